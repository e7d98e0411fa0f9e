"""The rows of training and held-out text: read, checked and tokenised before any work starts, then given in batches.

What is wrong is told with source, place and reason. This file knows nothing of models: of the base it needs the
tokenizer and the ids that end a text.
"""

# Shape legend: V vocabulary

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader

from train.batches import Batch, bucket, collate, collate_packed, num_tokens, pack, widen
from train.chat import Encoded
from train.feature_files import FeatureFiles
from train.formats import make_encoder
from train.lint import Lint, check_row
from train.resume import resumable
from train.rows import Row, expand_sources, read_rows

_SHOWN = 5  # bad rows that an error lists in full


class DistillationDataModule(LightningDataModule):
    """Rows of text that the base itself has written, for training exits and for measuring them.

    Args:
        train_files: JSONL, JSON or Parquet files, patterns of their names (`runs/text-*.jsonl`), or hub datasets as
            owner/name[/config][:split]; one or a list. `python -m train generate` makes such files.
        val_files: held-out rows; without them `val_fraction` of the training rows are held out.
        base: whose tokenizer and chat template apply; linked to model.base.
        revision: linked to model.revision.
        max_length: rows are cut after so many tokens (counted and told).
        batch_size: rows of one batch; with packing, sequences of one batch.
        packing: put several rows into one sequence of max_length, their attention kept apart: hardly any padding.
        group_by_length: batches of rows of similar length. With packing all sequences are long, and it changes nothing.
        num_workers: processes that put batches together; 0 is right for text that fits in memory.
        val_fraction: share of rows held out, chosen by a hash of the row, so the same rows in every run.
        seed: of the order of rows.
        feature_cache: a folder for the hidden states that the exits read (of `fit`, with a frozen base). They are
            computed once, and later epochs and runs skip the base's forward pass: much disk for much time; the size is
            told before it is written. Other rows, exits' depths or weights of the base need another folder.
        on_bad_row: `fail` stops and names the first bad rows, `python -m train lint` lists all; `skip` leaves them out.
            Either way `lints` counts them.
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
        packing: bool = False,
        group_by_length: bool = True,
        num_workers: int = 0,
        val_fraction: float = 0.05,
        seed: int = 0,
        feature_cache: str | None = None,
        on_bad_row: Literal["fail", "skip"] = "fail",
    ) -> None:
        super().__init__()
        for name, value, least in (("max_length", max_length, 2), ("batch_size", batch_size, 1)):
            if value < least:
                raise ValueError(f"data.{name}={value} must be at least {least}")
        if not 0 < val_fraction < 1:
            raise ValueError(f"data.val_fraction={val_fraction} must lie between 0 and 1")
        if num_workers < 0:
            raise ValueError(f"data.num_workers={num_workers} must be at least 0")
        self.train_files, self.val_files = _listed(train_files), _listed(val_files)
        self.base, self.revision = base, revision
        self.max_length, self.batch_size, self.num_workers = max_length, batch_size, num_workers
        self.packing, self.group_by_length = packing, group_by_length
        self.val_fraction, self.seed, self.on_bad_row = val_fraction, seed, on_bad_row
        self.feature_cache = feature_cache
        self.features: FeatureFiles | None = None  # of the run that goes on
        self.lints: list[Lint] = []
        self.train_rows: list[Encoded] = []
        self.val_rows: list[Encoded] = []

    def setup(self, stage: str) -> None:
        """Read, check and tokenise everything; raises ValueError for bad rows that are not to be skipped."""
        if not self.lints:
            self.read()
        self.check()

    def read(self) -> None:
        """Read and tokenise everything; what is wrong with rows stands in `lints`."""
        self.encoder = make_encoder(self.base, self.revision)
        rows, held_out = _read_all(self.train_files), _read_all(self.val_files)
        if not self.val_files:
            are_held_out = [self._holds_out(row) for row in rows]
            held_out = [row for row, is_held_out in zip(rows, are_held_out) if is_held_out]
            rows = [row for row, is_held_out in zip(rows, are_held_out) if not is_held_out]
        self.lints = [Lint(k, len(r), self.max_length) for k, r in (("training", rows), ("held-out", held_out))]
        self.train_rows, self.val_rows = (self._encode(r, lint) for r, lint in zip((rows, held_out), self.lints))

    def check(self) -> None:
        """ValueError if `read` has found what forbids to go on."""
        for lint in self.lints:
            self._check(lint)

    def _holds_out(self, row: Row) -> bool:
        content = {k: v for k, v in row.content.items() if k != "index"} if isinstance(row.content, dict) else None
        digest = hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).digest()
        return int.from_bytes(digest[:4], "big") < self.val_fraction * 2**32

    def _encode(self, rows: Sequence[Row], lint: Lint) -> list[Encoded]:
        encoded = []
        for row in rows:
            try:
                whole = self.encoder(row.content)
                answers = check_row(self.encoder, row.content, whole)
            except ValueError as error:
                lint.bad.append(f"{row.where}: {error}")
                continue
            clipped = whole.clipped(self.max_length)
            lint.add(whole, clipped, answers, self.encoder.eos_token_ids)
            if clipped.num_labels:
                encoded.append(clipped)
        return encoded

    def _check(self, lint: Lint) -> None:
        shown = "; ".join(lint.bad[:_SHOWN]) + ("; …" if len(lint.bad) > _SHOWN else "")
        if lint.bad and (self.on_bad_row == "fail" or len(lint.bad) == lint.num_rows):
            remedy = ", or set data.on_bad_row=skip" if len(lint.bad) < lint.num_rows else ""
            raise ValueError(
                f"{len(lint.bad)} of {lint.num_rows} {lint.kind} rows can't be used: {shown}. Mend them{remedy}; "
                "`python -m train lint` lists them all"
            )
        if not lint.num_used:
            raise ValueError(
                f"no {lint.kind} row carries a label: {lint.num_rows} read, {lint.num_unlabelled} without one "
                f"within data.max_length={self.max_length}. {f'Bad: {shown}. ' if shown else ''}Give more rows, "
                "raise max_length, or set data.val_files"
            )
        limit = self.encoder.max_positions
        if limit is not None and lint.longest > limit:  # OPT would fail inside, a RoPE model train on unknown places
            raise ValueError(
                f"data.max_length={self.max_length} leaves a {lint.kind} row of {lint.longest} tokens, but the base "
                f"has {limit} positions (max_position_embeddings): set max_length to that or less"
            )

    def label_counts(self, vocab_size: int) -> Tensor:
        """How often each id is a label in the training rows: [V] int64."""
        labels = [t for row in self.train_rows for t, m in zip(row.token_ids[1:], row.loss_mask[1:]) if m]
        return torch.bincount(torch.tensor(labels, dtype=torch.int64), minlength=vocab_size)

    def train_dataloader(self) -> DataLoader[Any]:
        loader = self._loader(self.train_rows)
        return loader if self.trainer is None else resumable(loader, self.trainer, self.seed)

    def val_dataloader(self) -> DataLoader[Any]:
        return self._loader(self.val_rows)

    def test_dataloader(self) -> DataLoader[Any]:
        return self.val_dataloader()

    def _loader(self, rows: Sequence[Encoded]) -> DataLoader[Any]:
        # The items are whole batches, so that Lightning's own sampler for several ranks fits
        return DataLoader(
            self.batches(rows),  # type: ignore[arg-type]
            batch_size=1,
            num_workers=self.num_workers,
            collate_fn=partial(_collate_one, self._collation()),
        )

    def batches(self, rows: Sequence[Encoded]) -> Sequence[Sequence[Sequence[Encoded]]]:
        """Batches of sequences of rows: several in one with packing, else one."""
        ranks = self.trainer.world_size if self.trainer is not None else 1
        if self.packing:
            return bucket(pack(rows, self.max_length, self.seed), self.batch_size, self.seed, multiple_of=ranks)
        length = num_tokens if self.group_by_length else None
        return bucket([[row] for row in rows], self.batch_size, self.seed, length=length, multiple_of=ranks)

    def collate(self, sequences: Sequence[Sequence[Encoded]]) -> Batch:
        """One of `batches`, without what the feature cache holds of it."""
        return self._collation()._replace(features=None)(sequences)

    def _collation(self) -> Collation:
        limit = self.encoder.max_positions
        return Collation(self.packing, min(self.max_length, limit or self.max_length), self.features)


class Collation(NamedTuple):
    """How sequences of rows become a batch."""

    packing: bool
    limit: int  # tokens, beyond which no batch is widened
    features: FeatureFiles | None

    def __call__(self, sequences: Sequence[Sequence[Encoded]]) -> Batch:
        batch = collate_packed(sequences) if self.packing else collate([row for (row,) in sequences])
        batch = widen(batch, self.limit)
        if self.features is None:
            return batch
        return batch._replace(kept=self.features.read(sequences, batch.token_ids.shape[1]))


def _collate_one(collation: Collation, batches: list[Sequence[Sequence[Encoded]]]) -> Batch:
    (batch,) = batches
    return collation(batch)


def _read_all(sources: Sequence[str]) -> list[Row]:
    return [row for source in sources for file in expand_sources(source) for row in read_rows(file)]


def _listed(files: str | list[str] | None) -> list[str]:
    return [files] if isinstance(files, str) else list(files or [])
