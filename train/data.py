"""Training rows from local files, checked, tokenised and put into batches of similar length.

A row is `messages` (chat), `prompt` and `response`, `text`, or `token_ids` with `loss_mask` (what `train generate`
writes). Every row is looked at before any work starts; what is wrong is told with file, row and reason. This file knows
nothing of models: of the base it needs the tokenizer and the ids that end a text.
"""

# Shape legend: B rows, T tokens of the longest row, V vocabulary

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import AutoConfig, GenerationConfig, PreTrainedTokenizerBase

from train.base_model import ending_ids, load_tokenizer, resolve_base
from train.chat import Encoded, encode_messages, encode_text

SUFFIXES = (".jsonl", ".json", ".parquet")
_SHOWN = 5  # bad rows that an error lists in full


class Batch(NamedTuple):
    """Rows padded on the right; padding is known by its place, never by its id."""

    token_ids: Tensor  # [B, T] int64
    loss_mask: Tensor  # [B, T] bool, True: this token is a label (predicted at the position before it)


class Row(NamedTuple):
    """One row as it stands in its file."""

    file: Path
    number: int  # counted from 1
    content: Any


def collate(rows: Sequence[Encoded]) -> Batch:
    longest = max(len(row.token_ids) for row in rows)
    token_ids = torch.zeros(len(rows), longest, dtype=torch.int64)
    loss_mask = torch.zeros(len(rows), longest, dtype=torch.bool)
    for n, row in enumerate(rows):
        token_ids[n, : len(row.token_ids)] = torch.tensor(row.token_ids)
        loss_mask[n, 1 : len(row.loss_mask)] = torch.tensor(row.loss_mask[1:])  # nothing predicts the first token
    return Batch(token_ids, loss_mask)


def read_rows(path: Path) -> Iterator[Row]:
    """The rows of one file; a line that is no JSON comes as its ValueError."""
    if path.suffix not in SUFFIXES:
        raise ValueError(f"{path}: expected a file that ends in {', '.join(SUFFIXES)}")
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    if path.suffix == ".parquet":
        import pyarrow.parquet

        contents: list[Any] = pyarrow.parquet.read_table(path).to_pylist()
        yield from (Row(path, n, c) for n, c in enumerate(contents, 1))
        return
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 at byte {error.start}; convert it first") from error
    if path.suffix == ".json":
        contents = _parse(text)
        if isinstance(contents, ValueError):
            raise ValueError(f"{path}: not valid JSON: {contents}")
        if not isinstance(contents, list):
            raise ValueError(f"{path}: expected one JSON list of rows; for one row a line call it .jsonl")
        yield from (Row(path, n, c) for n, c in enumerate(contents, 1))
        return
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield Row(path, number, _parse(line))


def _parse(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        return ValueError(f"not JSON: {error}")


class Encoder:
    """Rows → token ids with a loss mask; ValueError with the reason for a row that can't be used."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, eos_token_ids: Sequence[int], vocab_size: int) -> None:
        self.tokenizer = tokenizer
        self.eos_token_ids = eos_token_ids
        self.vocab_size = vocab_size

    def __call__(self, content: Any) -> Encoded:
        if isinstance(content, ValueError):
            raise content
        if not isinstance(content, dict) or not content:
            raise ValueError("expected an object with messages, prompt and response, text, or token_ids and loss_mask")
        if "token_ids" in content:
            return self._ids(content["token_ids"], content.get("loss_mask"))
        if "messages" in content:
            complete = content.get("complete") is not False
            return encode_messages(self.tokenizer, content["messages"], self.eos_token_ids, complete)
        if "prompt" in content or "response" in content:
            return self._pair(_text(content, "prompt"), _text(content, "response"))
        if "text" in content:
            return encode_text(self.tokenizer, _text(content, "text"))
        raise ValueError(f"has only {', '.join(sorted(content))}; expected messages, prompt, text or token_ids")

    def _pair(self, prompt: str, response: str) -> Encoded:
        if self.tokenizer.chat_template is None:
            return encode_text(self.tokenizer, response, prompt=prompt, end=True)
        messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}]
        return encode_messages(self.tokenizer, messages, self.eos_token_ids)

    def _ids(self, token_ids: Any, loss_mask: Any) -> Encoded:
        if not isinstance(token_ids, list) or not isinstance(loss_mask, list) or len(token_ids) != len(loss_mask):
            raise ValueError("token_ids and loss_mask must be lists of the same length")
        for n, token in enumerate(token_ids):
            if type(token) is not int or not 0 <= token < self.vocab_size:
                raise ValueError(f"token_ids[{n}]={token!r} must be an id in 0..{self.vocab_size - 1}")
        bad = [m for m in loss_mask if m not in (0, 1)]
        if bad:
            raise ValueError(f"loss_mask must hold 0 and 1, got {bad[0]!r}")
        return Encoded(token_ids, [bool(m) for m in loss_mask])


def _text(content: dict[str, Any], key: str) -> str:
    value = content.get(key)
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{key} must be a text that is not empty, got {value!r}")
    return value


class DistillationDataModule(LightningDataModule):
    """Rows of text that the base itself has written, for training exits and for measuring them.

    Args:
        train_files: JSONL, JSON or Parquet files, one or a list. `python -m train generate` makes them.
        val_files: held-out rows; without them `val_fraction` of the training rows are held out.
        base: whose tokenizer and chat template apply; linked to model.base.
        revision: linked to model.revision.
        max_length: rows are cut after so many tokens (counted and told).
        batch_size: rows of one batch.
        num_workers: processes that put batches together; 0 is right for text that fits in memory.
        val_fraction: share of rows held out, chosen by a hash of the row, so the same rows in every run.
        seed: of the order of rows.
        on_bad_row: `fail` lists the bad rows and stops; `skip` leaves them out and says how many.
    """

    def __init__(
        self,
        train_files: str | list[str],
        val_files: str | list[str] | None = None,
        *,
        base: str = "smollm2-135m",
        revision: str | None = None,
        max_length: int = 512,
        batch_size: int = 16,
        num_workers: int = 0,
        val_fraction: float = 0.05,
        seed: int = 0,
        on_bad_row: Literal["fail", "skip"] = "fail",
    ) -> None:
        super().__init__()
        for name, value, least in (("max_length", max_length, 2), ("batch_size", batch_size, 1)):
            if value < least:
                raise ValueError(f"data.{name}={value} must be at least {least}")
        if not 0 < val_fraction < 1:
            raise ValueError(f"data.val_fraction={val_fraction} must lie between 0 and 1")
        self.train_files, self.val_files = _paths(train_files), _paths(val_files)
        self.base, self.revision = base, revision
        self.max_length, self.batch_size, self.num_workers = max_length, batch_size, num_workers
        self.val_fraction, self.seed, self.on_bad_row = val_fraction, seed, on_bad_row
        self.train_rows: list[Encoded] = []
        self.val_rows: list[Encoded] = []

    def setup(self, stage: str) -> None:
        """Read, check and tokenise everything; raises ValueError that lists the bad rows."""
        if self.val_rows:
            return
        rows = [row for path in self.train_files for row in read_rows(path)]
        held_out = [row for path in self.val_files for row in read_rows(path)]
        if not self.val_files:
            held_out = [row for row in rows if self._holds_out(row)]
            rows = [row for row in rows if not self._holds_out(row)]
        encoder = make_encoder(self.base, self.revision)
        self.train_rows = self._encode(rows, encoder, "training")
        self.val_rows = self._encode(held_out, encoder, "held-out")

    def _holds_out(self, row: Row) -> bool:
        content = {k: v for k, v in row.content.items() if k != "index"} if isinstance(row.content, dict) else None
        digest = hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).digest()
        return int.from_bytes(digest[:4], "big") < self.val_fraction * 2**32

    def _encode(self, rows: Sequence[Row], encoder: Encoder, kind: str) -> list[Encoded]:
        encoded, problems, num_cut, num_unlabelled = [], [], 0, 0
        for row in rows:
            try:
                whole = encoder(row.content)
            except ValueError as error:
                problems.append(f"{row.file}, row {row.number}: {error}")
                continue
            clipped = whole.clipped(self.max_length)
            num_cut += len(whole.token_ids) > self.max_length
            if clipped.num_labels:
                encoded.append(clipped)
            else:
                num_unlabelled += 1
        self._tell(problems, len(rows), num_cut, num_unlabelled, kind)
        if not encoded:
            raise ValueError(
                f"no {kind} row carries a label: {len(rows)} read, {len(problems)} bad, {num_unlabelled} without one "
                f"within data.max_length={self.max_length}. Give more rows, raise max_length, or set data.val_files"
            )
        return encoded

    def _tell(self, problems: list[str], num_rows: int, num_cut: int, num_unlabelled: int, kind: str) -> None:
        if problems:
            shown = "; ".join(problems[:_SHOWN]) + ("; …" if len(problems) > _SHOWN else "")
            if self.on_bad_row == "fail":
                raise ValueError(
                    f"{len(problems)} of {num_rows} {kind} rows can't be used: {shown}. "
                    "Mend them, or set data.on_bad_row=skip"
                )
            rank_zero_warn(f"{len(problems)} of {num_rows} {kind} rows were skipped: {shown}")
        if num_unlabelled:
            rank_zero_warn(
                f"{num_unlabelled} of {num_rows} {kind} rows were dropped: no label is left within "
                f"data.max_length={self.max_length}"
            )
        if num_cut:
            rank_zero_info(f"{num_cut} of {num_rows} {kind} rows were cut at data.max_length={self.max_length}")

    def label_counts(self, vocab_size: int) -> Tensor:
        """How often each id is a label in the training rows: [V] int64."""
        labels = [t for row in self.train_rows for t, m in zip(row.token_ids[1:], row.loss_mask[1:]) if m]
        return torch.bincount(torch.tensor(labels, dtype=torch.int64), minlength=vocab_size)

    def train_dataloader(self) -> DataLoader[Any]:
        return self._loader(self.train_rows, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return self._loader(self.val_rows, shuffle=False)

    def test_dataloader(self) -> DataLoader[Any]:
        return self.val_dataloader()

    def _loader(self, rows: Sequence[Encoded], shuffle: bool) -> DataLoader[Any]:
        # The items are whole batches, so that Lightning's own sampler for several ranks fits
        return DataLoader(
            bucket(rows, self.batch_size, self.seed),  # type: ignore[arg-type]
            batch_size=1,
            shuffle=shuffle,
            num_workers=self.num_workers,
            collate_fn=_collate_one,
        )


def bucket(rows: Sequence[Encoded], batch_size: int, seed: int) -> list[list[Encoded]]:
    """Every row once, in batches of rows of similar length, so that little is padding."""
    order = list(rows)
    random.Random(seed).shuffle(order)
    order.sort(key=lambda row: len(row.token_ids))  # stable: equal lengths stay shuffled
    batches = [order[n : n + batch_size] for n in range(0, len(order), batch_size)]
    random.Random(seed + 1).shuffle(batches)
    return batches


def _collate_one(batches: list[list[Encoded]]) -> Batch:
    return collate(batches[0])


def make_encoder(base: str, revision: str | None = None) -> Encoder:
    """The encoder of a base, from its tokenizer and configs; no weights are read."""
    tokenizer = load_tokenizer(base, revision)  # first: it explains a base that can't be found
    source, revision = resolve_base(base), revision or "main"
    config = AutoConfig.from_pretrained(source, revision=revision)
    generation_config = None
    with suppress(OSError):  # a base without generation_config.json
        generation_config = GenerationConfig.from_pretrained(source, revision=revision)
    return Encoder(tokenizer, ending_ids(config, generation_config), config.vocab_size)


def _paths(files: str | list[str] | None) -> list[Path]:
    return [Path(f) for f in ([files] if isinstance(files, str) else files or [])]
