"""`python -m export.memory ARGS…`: runs `python -m export ARGS…` and tells the most memory that it held.

All of its processes count, compilers included. Told is the growth after the imports: what all processes hold together,
less what the export held when it printed its first line. Linux alone, as it reads /proc; it imports no PyTorch.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

INTERVAL = 0.05  # seconds between looks
STEP = 1.005  # what is less than this above the most so far is not looked at
MEGABYTE = 1e6
PAGE = resource.getpagesize()


class Held(NamedTuple):
    """What a process and all that it has started hold, in bytes."""

    resident: int  # pages that several share count in each, as in RSS
    shared_out: int  # the same with such pages divided among those that share them, as in PSS
    num_processes: int


def main(argv: Sequence[str]) -> int:
    """Export's own exit code."""
    if not Path("/proc/self/smaps_rollup").exists():
        print("error: export.memory reads /proc/<pid>/smaps_rollup, which Linux alone has", file=sys.stderr)
        return 2
    with subprocess.Popen([sys.executable, "-u", "-m", "export", *argv], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = iter(process.stdout)
        print(next(lines, ""), end="", flush=True)
        start, before = time.monotonic(), held(process.pid)
        most, at = before, 0.0
        reader = threading.Thread(target=_forward, args=(lines,))
        reader.start()
        while process.poll() is None:
            # Who shares which page takes the kernel long to tell: asked only where there is more than before
            if sum(map(_resident, process_tree(process.pid))) > STEP * most.resident:
                most, at = max(most, held(process.pid)), time.monotonic() - start
            time.sleep(INTERVAL)
        reader.join()
    growth = [(b - a) / MEGABYTE for a, b in zip(before[:2], most[:2], strict=True)]
    print(
        f"memory: {growth[0]:.0f} MB more than the {before.resident / MEGABYTE:.0f} MB after the imports, at "
        f"{at:.0f} s in {most.num_processes} processes; {growth[1]:.0f} MB where shared pages count once"
    )
    return process.returncode


def _forward(lines: Iterator[str]) -> None:
    for line in lines:
        print(line, end="", flush=True)


def held(pid: int) -> Held:
    """Now; what ends meanwhile counts nothing."""
    found = [one for one in map(_rollup, process_tree(pid)) if one is not None]
    return Held(sum(rss for rss, _ in found), sum(pss for _, pss in found), len(found))


def _resident(pid: int) -> int:
    """RSS of a process in bytes; 0 when it has ended."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE
    except OSError:
        return 0


def _rollup(pid: int) -> tuple[int, int] | None:
    """(RSS, PSS) of a process; None when it has ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    except OSError:
        return None
    sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}  # they are in kB
    return sizes["Rss"], sizes["Pss"]


def process_tree(pid: int) -> list[int]:
    """`pid` and every process below it."""
    children = dict[int, list[int]]()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        children.setdefault(parent, []).append(int(stat.parent.name))
    found = [pid]
    for one in found:  # it grows while it is read
        found += children.get(one, [])
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
