"""What validation promises of exits, on a text that goes with them: validation.json in the folder heads/.

Export counts the same through the programs that it has compiled, on the same text, and refuses to write an artifact
that keeps less. The record holds that text as token ids, some held-out rows, and what validation counted in each.
`train.counting` makes one. This file knows nothing of models, programs or Lightning.
"""

# Shape legend: T tokens of one row

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from infer.records import MAX_JSON, load_json, read_record
from train.acceptance import MAX_DRAFT_TOKENS, Acceptance
from train.chat import Encoded
from train.reference import weights_sha256

FILE = "validation.json"
FORMAT_VERSION = 1
REMEDY = "remove it to export without this check, or write it anew with python -m train promise"


@dataclass(frozen=True, kw_only=True, slots=True)
class PromisedRow:
    """One row, and what validation counted in it."""

    token_ids: list[int]  # [T]
    labels: list[tuple[int, int]]  # [start, stop) of each stretch of labels, by the labels' own places
    # exit name → `Acceptance.counts()` against the target: matches, tokens, rounds, then γ times rounds in which the
    # first j + 1 drafts were accepted
    counts: dict[str, list[int]]

    @property
    def encoded(self) -> Encoded:
        mask = [False] * len(self.token_ids)
        for start, stop in self.labels:
            mask[start:stop] = [True] * (stop - start)
        return Encoded(self.token_ids, mask)


@dataclass(frozen=True, kw_only=True, slots=True)
class Promise:
    """What the exits of one folder heads/ were worth to the target when they were validated."""

    rows: list[PromisedRow]
    num_draft_tokens: int  # γ
    exits: list[str]
    weights_sha256: str = ""  # of the folder's own heads and vocabularies; set when it is written
    format_version: int = FORMAT_VERSION

    def acceptance(self, name: str) -> Acceptance:
        """Of an exit, in all rows."""
        zero = Acceptance(self.num_draft_tokens).counts()
        counts = [row.counts[name] for row in self.rows]
        return Acceptance.of([sum(numbers) for numbers in zip(zero, *counts, strict=True)])

    def write(self, folder: Path) -> None:
        """Into a folder heads/ whose weights are there, whole or not at all."""
        record = asdict(self) | {"weights_sha256": weights_sha256(folder)}
        text = json.dumps(record, separators=(",", ":")).replace('{"token_ids"', '\n{"token_ids"') + "\n"
        assert len(text) <= MAX_JSON, len(text)
        temporary = folder / f".{FILE}.tmp"
        temporary.write_text(text)
        os.replace(temporary, folder / FILE)

    @classmethod
    def read(cls, folder: Path) -> Self | None:
        """Of a folder heads/; None where it has none.

        Raises:
            ValueError: it is damaged, or of other weights than those that lie beside it.
        """
        path = folder / FILE
        if not path.exists():
            return None
        if path.stat().st_size > MAX_JSON:
            raise ValueError(f"{path}: {path.stat().st_size} bytes, at most {MAX_JSON} are expected; {REMEDY}")
        found: Self = read_record(
            cls, load_json(path.read_text(encoding="utf-8"), str(path), REMEDY), str(path), REMEDY
        )
        for fault in found._faults():
            raise ValueError(f"{path}: {fault}; {REMEDY}")
        if found.weights_sha256 != weights_sha256(folder):
            raise ValueError(f"{path}: tells of other weights than those beside it; {REMEDY}")
        return found

    def _faults(self) -> Iterator[str]:
        if self.format_version != FORMAT_VERSION:
            yield f"format_version={self.format_version}, this code reads {FORMAT_VERSION}"
        if not 1 <= self.num_draft_tokens <= MAX_DRAFT_TOKENS:
            yield f"num_draft_tokens={self.num_draft_tokens} must lie in [1, {MAX_DRAFT_TOKENS}]"
        if not self.rows or not self.exits:
            yield "rows and exits must not be empty"
        for number, row in enumerate(self.rows):
            where, length = f"rows[{number}]", len(row.token_ids)
            ends = [0, *(end for span in row.labels for end in span)]
            if not row.labels or ends != sorted(ends) or any(a == b for a, b in row.labels) or ends[-1] > length:
                yield f"{where}: labels={row.labels} must be stretches of its {length} tokens, in order"
            if any(token < 0 for token in row.token_ids):
                yield f"{where}: a token id is negative"
            if sorted(row.counts) != sorted(self.exits):
                yield f"{where}: counts are of {sorted(row.counts)}, expected {sorted(self.exits)}"
            for name, counts in row.counts.items():
                if len(counts) != 3 + self.num_draft_tokens or not _are_counts(counts):
                    yield f"{where}: counts of {name}={counts} are none of γ={self.num_draft_tokens}"


def _are_counts(counts: Sequence[int]) -> bool:
    """Whether matches, tokens, rounds and accepted drafts can be so many."""
    num_matches, num_tokens, num_rounds, *accepted = counts
    return 0 <= num_matches <= num_tokens and [num_rounds, *accepted, 0] == sorted(
        [num_rounds, *accepted, 0], reverse=True
    )


def describe(acceptance: Mapping[str, Acceptance]) -> str:
    """One line: exit, agreement and acceptance length."""
    return ", ".join(
        f"{name} agreement {one.agreement:.1%}, acceptance length {one.length:.3f}" for name, one in acceptance.items()
    )
