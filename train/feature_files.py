"""Hidden states of rows in a folder on disk: what they depend on, and the states themselves; knows nothing of models.

    manifest.json   what the states depend on, and their size
    states.bin      row after row, in the order of the rows' hashes: hidden states [S, T, D], and as float32 the
                    logsumexp [T] of the target's logits; no padding

While the folder is written it is called .NAME.unfinished and has one file more, `done`, with a byte for each row. So
a folder that has its name is whole, and a writer that was killed goes on where it stopped.
A row is known by its token ids: with them tokenizer, template, text and cut are known, and two rows with the same ids
have the same states.
"""

# Shape legend: B sequences, T tokens, S depths whose states are kept, D hidden size

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from train.batches import Kept
from train.chat import Encoded

FORMAT_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Origin:
    """What states depend on, but for the rows."""

    weights_sha256: str  # of the base
    config_sha256: str  # of the base
    depths: list[int]  # number of layers below each state
    hidden_size: int
    dtype: str  # of the states: what the base gives, so that nothing is lost
    precision: str  # trainer.precision, in which the base runs
    versions: dict[str, str]  # of the libraries that compute


class FeatureFiles:
    """The states of `rows`, in a folder that may still have to be written.

    Args:
        folder: the folder's name, `data.feature_cache`.
        rows: whose states it holds.
    """

    def __init__(self, folder: str | os.PathLike[str], rows: Iterable[Encoded]) -> None:
        self.folder = Path(folder).expanduser().absolute()
        self.unfinished = self.folder.with_name(f".{self.folder.name}.unfinished")
        lengths = {_digest(row): len(row.token_ids) for row in rows}
        self._number: dict[bytes, int] = {}  # a row's digest → its number
        self._start: dict[bytes, int] = {}  # a row's digest → its first token
        self.num_tokens = 0
        for number, digest in enumerate(sorted(lengths)):
            self._number[digest], self._start[digest] = number, self.num_tokens
            self.num_tokens += lengths[digest]
        self._rows_sha256 = hashlib.sha256(b"".join(self._number)).hexdigest()
        self._origin: Origin | None = None
        self._states: int | None = None  # file descriptors
        self._done: int | None = None

    @property
    def origin(self) -> Origin:
        assert self._origin is not None, "neither `find` nor `begin` nor `join` has been called"
        return self._origin

    @property
    def num_rows(self) -> int:
        return len(self._number)

    def num_bytes(self, origin: Origin) -> int:
        return self.num_tokens * _token_bytes(origin)

    # ---- reading ----

    def find(self, origin: Origin) -> bool:
        """Whether the folder is there, whole, and of this origin and these rows.

        Raises:
            ValueError: it is something else.
        """
        if not self.folder.exists() or (self.folder.is_dir() and not any(self.folder.iterdir())):
            return False
        differing = _differences(_read_manifest(self.folder), self._manifest(origin))
        if differing:
            raise ValueError(
                f"data.feature_cache={self.folder} holds the states of something else: {'; '.join(differing)}. Remove "
                "that folder, or name another one"
            )
        size, expected = (self.folder / "states.bin").stat().st_size, self.num_bytes(origin)
        if size != expected:
            raise ValueError(
                f"data.feature_cache={self.folder}: states.bin has {size} bytes instead of {expected}; remove that "
                "folder, or name another one"
            )
        self._origin = origin
        return True

    def read(self, sequences: Sequence[Sequence[Encoded]], width: int) -> Kept:
        """Of each sequence its rows one after another, then zeros up to `width` tokens."""
        if self._states is None:
            self._states = os.open(self.folder / "states.bin", os.O_RDONLY)
        origin, num_sequences = self.origin, len(sequences)
        hidden = torch.zeros(len(origin.depths), num_sequences, width, origin.hidden_size, dtype=_dtype(origin))
        partition = torch.zeros(num_sequences, width)
        arrays = [*hidden.view(torch.uint8).numpy(), partition.numpy()]  # [B, width, …] each
        for n, sequence in enumerate(sequences):
            first = 0
            for row in sequence:
                stop = first + len(row.token_ids)
                places = [array[n, first:stop].data.cast("B") for array in arrays]
                num_read = os.preadv(self._states, places, self._offset(row))
                assert num_read == sum(place.nbytes for place in places), (self.folder, num_read)
                first = stop
        return Kept(hidden, partition)

    def _offset(self, row: Encoded) -> int:
        """Of the row in states.bin, in bytes."""
        return self._start[_digest(row)] * _token_bytes(self.origin)

    def __getstate__(self) -> dict[str, Any]:
        """For workers that are not forked: each opens the file itself."""
        return self.__dict__ | {"_states": None, "_done": None}

    # ---- writing ----

    def begin(self, origin: Origin) -> None:
        """Make the unfinished folder with room for all states, or go on with one of the same origin and rows.

        Raises:
            ValueError: the disk has no room, or another process is writing.
        """
        self.unfinished.parent.mkdir(parents=True, exist_ok=True)
        self.check_room(origin)
        manifest = self._manifest(origin)
        if self.unfinished.exists() and not self._goes_on(manifest):
            shutil.rmtree(self.unfinished)
        self.unfinished.mkdir(exist_ok=True)
        self._open(os.O_CREAT)
        os.truncate(self.unfinished / "done", self.num_rows)
        os.posix_fallocate(self._written, 0, self.num_bytes(origin))
        (self.unfinished / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n")
        self._origin = origin

    def _goes_on(self, manifest: Mapping[str, Any]) -> bool:
        done = self.unfinished / "done"
        if done.exists():
            with done.open("rb") as file:
                _lock(file.fileno(), self.unfinished)
        path = self.unfinished / "manifest.json"  # written last, so with it the rest is there
        return path.exists() and not _differences(_read_manifest(self.unfinished), manifest)

    def check_room(self, origin: Origin) -> None:
        """ValueError unless the disk has room for what is not written yet."""
        path = self.unfinished / "states.bin"
        there = path.stat().st_blocks * 512 if path.exists() else 0
        needed, free = self.num_bytes(origin) - there, shutil.disk_usage(self.unfinished.parent).free
        if needed > free:
            raise ValueError(
                f"data.feature_cache={self.folder}: {needed / 1e9:.2f} GB are needed there, {free / 1e9:.2f} GB are "
                "free: make room, choose another disk, or leave data.feature_cache out"
            )

    def join(self, origin: Origin) -> None:
        """Write into what another process has begun.

        Raises:
            ValueError: it is not seen from here.
        """
        if not (self.unfinished / "manifest.json").exists():
            raise ValueError(
                f"data.feature_cache={self.folder}: what the first process has begun there is not seen by this one; "
                "name a folder on a disk that all processes share"
            )
        self._open(0)
        self._origin = origin

    def _open(self, flags: int) -> None:
        self._written = os.open(self.unfinished / "states.bin", os.O_RDWR | flags, 0o666)
        self._done = os.open(self.unfinished / "done", os.O_RDWR | flags, 0o666)
        if flags:
            _lock(self._done, self.unfinished)

    def done(self) -> np.ndarray:
        """[rows] bool, which are written; a copy, of now."""
        assert self._done is not None
        return np.frombuffer(os.pread(self._done, self.num_rows, 0), dtype=bool).copy()

    def number(self, row: Encoded) -> int:
        return self._number[_digest(row)]

    def write(self, row: Encoded, hidden: Tensor, log_partition: Tensor) -> None:
        """hidden [S, T, D] and log_partition [T] of the row."""
        assert self._done is not None
        content = [_bytes(hidden), _bytes(log_partition)]
        written = os.pwritev(self._written, content, self._offset(row))
        assert written == sum(part.nbytes for part in content), written
        os.pwrite(self._done, b"\1", self.number(row))

    def close(self) -> None:
        """After the last `write`, in every process."""
        assert self._done is not None
        os.fsync(self._written)
        os.close(self._written)
        os.close(self._done)
        self._done = None

    def finish(self) -> None:
        """Give the folder its name; in one process, when all have closed."""
        done = (self.unfinished / "done").read_bytes()
        assert done == b"\1" * self.num_rows, f"{done.count(0)} of {self.num_rows} rows were not written"
        (self.unfinished / "done").unlink()
        os.rename(self.unfinished, self.folder)  # over an empty folder, or none

    def _manifest(self, origin: Origin) -> dict[str, Any]:
        rows = {"rows_sha256": self._rows_sha256, "num_rows": self.num_rows, "num_tokens": self.num_tokens}
        return {"format_version": FORMAT_VERSION, **asdict(origin), **rows}


def _digest(row: Encoded) -> bytes:
    return hashlib.sha256(np.asarray(row.token_ids, dtype=np.int64).tobytes()).digest()


def _dtype(origin: Origin) -> torch.dtype:
    return getattr(torch, origin.dtype)


def _token_bytes(origin: Origin) -> int:
    return len(origin.depths) * origin.hidden_size * _dtype(origin).itemsize + torch.float32.itemsize


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def _lock(file: int, folder: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise ValueError(
            f"{folder}: another process is writing it; wait for its end, or name another folder"
        ) from error


def _read_manifest(folder: Path) -> dict[str, Any]:
    try:
        manifest = json.loads((folder / "manifest.json").read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"data.feature_cache={folder} is no feature cache ({error}); name another folder") from error
    return manifest if isinstance(manifest, dict) else {}


def _differences(kept: Mapping[str, Any], asked: Mapping[str, Any]) -> list[str]:
    return [f"{key} {kept.get(key)!r} there, {value!r} here" for key, value in asked.items() if kept.get(key) != value]
