"""Validation's figures outside of a Trainer, and the promise that goes with a folder heads/ (`train.promise`).

This file knows nothing of command lines or Lightning's loops.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import nn

from train.batches import Batch, collate, widen
from train.chat import Encoded
from train.figures import TARGET, Figures
from train.promise import Promise, PromisedRow

NUM_LABELS = 2048  # enough for a few tenths of a point: it is the same text on both sides
MAX_TOKENS = 512  # of a row


class Validates(Protocol):
    """The part of `EarlyExitModule` that counts."""

    model: Any
    figures: Figures
    num_draft_tokens: int

    def on_validation_epoch_start(self) -> None: ...

    def validation_step(self, batch: Batch, _: int) -> None: ...


def promise(module: Validates, rows: Sequence[Encoded]) -> Promise | None:
    """Counted by validation's own step on some of the held-out `rows`; None where none carries a label.

    It leaves the module's `figures` empty and its mode as it was.
    """
    found, exits = [], [e.name for e in module.model.exits]
    for row in choose(rows):
        counted = count(module, [row])
        counts = {name: counted.acceptance[name, TARGET].counts() for name in exits}
        found.append(PromisedRow(token_ids=list(row.token_ids), labels=stretches(row.loss_mask), counts=counts))
    if not found:
        return None
    return Promise(rows=found, num_draft_tokens=module.num_draft_tokens, exits=exits)


def choose(rows: Sequence[Encoded]) -> list[Encoded]:
    """Rows, cut to MAX_TOKENS, in an order that is always the same, until they hold NUM_LABELS labels."""
    order = list(rows)
    random.Random(0).shuffle(order)
    chosen, num_labels = list[Encoded](), 0
    for row in (row.clipped(MAX_TOKENS) for row in order):
        if num_labels >= NUM_LABELS:
            break
        if row.num_labels:
            chosen.append(row)
            num_labels += row.num_labels
    return chosen


def answered(prompts: Sequence[list[int]], answers: Sequence[list[int]], max_tokens: int) -> list[Encoded]:
    """The engine's answers as rows in which rounds end where its own do, for a count of rounds.

    Of r tokens that are left up to `max_tokens` the engine drafts at most r − 1, as the last is the target's own, and
    where one is left it drafts nothing. So the last token of an answer that is as long as it may be is no label.
    """
    rows = []
    for prompt, answer in zip(prompts, answers, strict=True):
        num_labels = len(answer) - (len(answer) == max_tokens)
        mask = [False] * len(prompt) + [True] * num_labels + [False] * (len(answer) - num_labels)
        if num_labels:
            rows.append(Encoded(prompt + answer, mask))
    return rows


def stretches(loss_mask: Sequence[bool]) -> list[tuple[int, int]]:
    """[start, stop) of each run of labels."""
    edges = [n for n, (a, b) in enumerate(zip([False, *loss_mask], [*loss_mask, False])) if a != b]
    return list(zip(edges[::2], edges[1::2], strict=True))


def count(module: Validates, rows: Sequence[Encoded]) -> Figures:
    """Validation's figures over `rows`, outside of a Trainer's own validation. Its mode is left as it was."""
    assert isinstance(module, nn.Module)
    was_training = module.training
    module.eval()
    module.on_validation_epoch_start()
    family = module.model.family
    with torch.no_grad():
        for n, row in enumerate(rows):
            batch = widen(collate([row]), family.max_positions)
            device = family.unembedding.device
            module.validation_step(Batch(batch.token_ids.to(device), batch.loss_mask.to(device)), n)
    module.train(was_training)
    return module.figures
