"""Pages of mapped files in this process's memory: how much a read-only mapping holds, and giving it back.

What a file's mapping holds in memory is a copy of the file: given back, it is read again where it is needed. Linux
alone; elsewhere nothing is known and nothing given back.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple

_SMAPS = Path("/proc/self/smaps")
_DONTNEED = 4  # MADV_DONTNEED of <sys/mman.h>
_HEAD = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (\S{4}) \S+ \S+ \S+\s+(/.*)")


class Mapping(NamedTuple):
    """A private read-only mapping of a file, no page of which differs from the file."""

    start: int
    stop: int
    file: str
    resident: int  # bytes


def release(file_names: Collection[str]) -> None:
    """Give back what mappings of files of these names (without folders) hold; OSError where the system refuses.

    Pages that were written to stay as they are: a library's relocated pointers would be lost with them.
    """
    libc: ctypes.CDLL | None = None
    for mapping in read_mappings(file_names):
        libc = libc or ctypes.CDLL(None, use_errno=True)
        start, size = ctypes.c_void_p(mapping.start), ctypes.c_size_t(mapping.stop - mapping.start)
        if libc.madvise(start, size, _DONTNEED):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), mapping.file)


def read_mappings(file_names: Collection[str]) -> Iterator[Mapping]:
    """Those of files of these names, as far as they are private, read-only and unchanged."""
    if not _SMAPS.exists():
        return
    found: tuple[str, ...] | None = None
    sizes = dict[str, int]()
    for line in _SMAPS.read_text(errors="surrogateescape").splitlines():
        key, _, rest = line.partition(":")
        if rest and key in ("Rss", "Anonymous"):  # in this order
            sizes[key] = int(rest.split()[0]) * 1024
            if key == "Anonymous" and found and not sizes[key]:
                yield Mapping(int(found[0], 16), int(found[1], 16), found[2], sizes["Rss"])
        elif head := _HEAD.fullmatch(line):
            start, stop, access, file = head.groups()
            found = (start, stop, file) if access == "r--p" and os.path.basename(file) in file_names else None
        elif re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            found = None
