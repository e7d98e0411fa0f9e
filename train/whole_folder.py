"""A folder that appears whole or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole_folder(target: Path, before_move: Callable[[], None] = lambda: None) -> Iterator[Path]:
    """A folder beside `target` that becomes `target` when the block ends well, and vanishes when it does not.

    What stood at `target` stays until then, and gives way whole. `before_move` may raise to keep it.
    """
    unfinished = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    replaced = unfinished.with_name(f"{unfinished.name}.replaced")
    try:
        yield unfinished
        open_to_readers(unfinished)
        before_move()
        if target.exists():
            os.rename(target, replaced)
        os.rename(unfinished, target)
        shutil.rmtree(replaced, ignore_errors=True)
    finally:
        if replaced.exists() and not target.exists():  # broken off between the two moves
            os.rename(replaced, target)
        shutil.rmtree(unfinished, ignore_errors=True)


def open_to_readers(folder: Path) -> None:
    """Modes 0755 and 0644 less the umask, throughout: mkdtemp and safetensors write privately, and copies stay so."""
    hidden = os.umask(0o077)  # it can only be read by setting it; private for that moment
    os.umask(hidden)
    for parent, _, names in os.walk(folder):
        os.chmod(parent, 0o755 & ~hidden)
        for path in (Path(parent, name) for name in names):
            if not path.is_symlink():  # the mode would be that of a file elsewhere
                path.chmod(0o644 & ~hidden)
