"""Ray itself: what it needs, and a connection to it. Knows nothing of what is run there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from infer.commands.serve import PACKAGES

DATA = ("ray", "pandas", "pyarrow")
SERVE = ("ray", *PACKAGES)


@contextmanager
def connected(address: str | None) -> Iterator[bool]:
    """A connection to the cluster at `address`, at RAY_ADDRESS, or else to one that is started on this machine and
    ended with the block. One that the caller has already is taken as it is, and kept.

    Yields:
        Whether a cluster was started, so that it is this machine alone.
    """
    import ray

    if ray.is_initialized():
        yield False
        return
    joined = address or os.environ.get("RAY_ADDRESS")
    try:
        if joined:
            ray.init(joined)
        else:  # and not the one that `ray start` may have left on this machine, which nobody has named
            ray.init("local", include_dashboard=False, runtime_env=_runtime_env())
    except ConnectionError as error:
        raise ValueError(f"no Ray cluster answers at {joined}: {error}") from error
    try:
        yield not joined
    finally:
        ray.shutdown()


def check_room(what: str, num: int, num_cpus: float, num_gpus: float) -> None:
    """ValueError if this machine's Ray could never hold all of them, which it would wait for."""
    import ray

    there = ray.cluster_resources()
    for name, each in (("CPU", num_cpus), ("GPU", num_gpus)):
        if num * each > (has := there.get(name, 0.0)):
            raise ValueError(
                f"{num} {what} of {each:g} {name}s each: this machine has {has:g}; take fewer, give each less, or name "
                "a cluster by --address"
            )


def _runtime_env() -> dict[str, Any]:
    """So that workers on this machine find a clone that is not installed."""
    root = Path(__file__).resolve().parents[2]
    if root.name in ("site-packages", "dist-packages"):
        return {}
    paths = [str(root), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {"env_vars": {"PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))}}
