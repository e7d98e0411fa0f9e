"""Pages of mapped files are given back, and nothing but those that are the file's."""

import ctypes
import mmap
from pathlib import Path

import pytest

from infer.mapped_pages import read_mappings, release

SIZE = 1 << 20

pytestmark = pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="Linux's /proc")


def map_file(path: Path, writable: bool = False) -> mmap.mmap:
    path.write_bytes(bytes(range(256)) * (SIZE // 256))
    with path.open("r+b") as file:
        prot = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        return mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=prot)


def resident(path: Path) -> list[int]:
    return [mapping.resident for mapping in read_mappings({path.name})]


def protect(mapped: mmap.mmap) -> None:
    """No more writing, as a linker does once it has relocated a library's pointers."""
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
    assert not ctypes.CDLL(None).mprotect(ctypes.c_void_p(address), ctypes.c_size_t(SIZE), mmap.PROT_READ)


def test_what_was_read_is_given_back_and_reads_the_same_again(tmp_path: Path) -> None:
    path, other = tmp_path / "code so", tmp_path / "other.so"
    with map_file(path) as mapped, map_file(other) as untouched:
        content = mapped[:]
        assert untouched[:] == content
        assert resident(path) == [SIZE]
        release({path.name})
        assert resident(path) == [0]
        assert resident(other) == [SIZE]
        assert mapped[:] == content


def test_pages_that_differ_from_the_file_stay(tmp_path: Path) -> None:
    path = tmp_path / "code.so"
    mapped = map_file(path, writable=True)
    mapped[:5] = b"fixed"
    protect(mapped)
    release({path.name})
    assert mapped[:5] == b"fixed"
