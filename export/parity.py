"""The gate: an artifact's programs against the Hugging Face forward, on every tier.

Rows are fed the way the runtime feeds them (prefill in chunks, decoding across block borders, ragged batches with
padding) and every tier's logits are compared with the dense model's, relative to the logits' scale. It knows programs
as callables, whatever backend runs them.
"""

# Shape legend: B rows, T query positions, M blocks per row, S block size, D hidden, V vocabulary

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from export.programs import TARGET, Span, tier_spans
from infer.manifest import ProgramInfo
from train.model import EarlyExitModel

MAX_ERROR = 1e-4  # fp32: rounding alone
# bf16 programs are held to the fp32 model, and may err this many times as much as the stock model's own bf16 forward.
# A fixed bound would not do: one bf16 forward may be off by 12 % of the scale where the compiled one is off by 2 %.
BF16_FACTOR = 2.0
# Picks that differ: none but ties in fp32; in bf16 twice the stock model's own share, and as many as chance adds
MAX_FLIPS, BF16_EXTRA_FLIPS = 0.01, 0.02

ROW_LENGTHS = (45, 29, 52)
# New tokens per row and call. Chunks of two blocks; single tokens and short windows across the borders at 16, 32, 48;
# a row that sits a call out.
ALONE = ([32], [1], [1], [5], [1], [3], [2])
WIDE = (1, 1)  # of each row in the widest call: its logits are large, so only the last are kept
RAGGED = ([32, 16, 20], [1, 0, 5], [5, 2, 8], [1, 5, 3], [2, 1, 1], [4, 5, 15])

Logits = dict[str, list[Tensor]]  # tier → for each row [length, V], a trimmed exit's [length, V']


class ParityError(RuntimeError):
    """An artifact that does not compute what its model computes."""


@dataclass(frozen=True, kw_only=True)
class TierParity:
    """One tier of one program set against the dense model."""

    tier: str
    max_error: float  # max |difference| / max |logit| of the fp32 model
    allowed: float
    top1_agreement: float
    least_agreement: float
    num_positions: int


@dataclass(frozen=True, kw_only=True)
class Reference:
    """What the tiers are held to."""

    logits: Logits  # of the fp32 model
    allowed: dict[str, float]  # tier → max |difference| / max |logit|
    max_flips: dict[str, float]  # tier → share of positions whose largest logit may be another id's


def make_reference(truth: Logits, own: Logits) -> Reference:
    """From the fp32 model's logits, and those of the model in the programs' dtype (the same object for fp32)."""
    if own is truth:
        return Reference(
            logits=truth, allowed=dict.fromkeys(truth, MAX_ERROR), max_flips=dict.fromkeys(truth, MAX_FLIPS)
        )
    allowed, flips = dict[str, float](), dict[str, float]()
    for tier in truth:
        got, expected = torch.cat(own[tier]), torch.cat(truth[tier])
        allowed[tier] = BF16_FACTOR * relative_error(got, expected)
        flips[tier] = BF16_FACTOR * (1 - top1_agreement(got, expected)) + BF16_EXTRA_FLIPS
    return Reference(logits=truth, allowed=allowed, max_flips=flips)


def top1_agreement(got: Tensor, expected: Tensor) -> float:
    """Share of positions [N, V] whose largest logit is the same id's."""
    return float((got.argmax(-1) == expected.argmax(-1)).double().mean())


def relative_error(got: Tensor, expected: Tensor) -> float:
    """max |difference| / max |expected|; NaN when either holds one."""
    return float((got.float() - expected.float()).abs().max() / expected.float().abs().max())


@torch.no_grad()
def reference_logits(model: EarlyExitModel, rows: Sequence[Tensor]) -> Logits:
    """What every tier should give: exits from the dense early-exit model, the target from the stock model's forward."""
    logits: Logits = {span.name: [] for span in tier_spans(model)}
    for row in (row.to(model.base.device) for row in rows):
        states = model(row.unsqueeze(0), drafted=torch.ones_like(row, dtype=torch.bool).unsqueeze(0)).exits
        for name, hidden in states.items():
            logits[name].append(model.unembed_exit(name, hidden)[0].cpu())
        model.family.use_attention("sdpa")
        logits[TARGET].append(model.base(row.unsqueeze(0), use_cache=False).logits[0].cpu())
    return logits


@dataclass(frozen=True, kw_only=True)
class Caller:
    """Calls an artifact's programs tier by tier over a small pool of pages."""

    programs: Mapping[str, Callable[..., Any]]
    infos: Mapping[str, ProgramInfo]
    spans: Sequence[Span]
    contexts: Sequence[str]  # names of the exits that read the target's state of the position before
    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    def run(self, rows: Sequence[Tensor], schedule: Sequence[Sequence[int]], keep_last: int | None = None) -> Logits:
        """Feed `rows` (token ids) by `schedule`; every tier's logits for the positions that were fed.

        keep_last: only those of each row's last so many calls; None: all.
        """
        blocks_per_row = -(-max(len(row) for row in rows) // self.block_size)
        # Rows' blocks interleave and descend: a program that took pages in order would be caught
        # (`contiguous` would leave a single column its odd stride, which a package that checks its inputs refuses)
        descending = torch.arange(len(rows) * blocks_per_row, 0, -1).view(blocks_per_row, len(rows))
        blocks = descending.T.clone(memory_format=torch.contiguous_format)
        pages = self.new_pages(len(rows) * blocks_per_row)
        found: dict[str, list[list[Tensor]]] = {span.name: [[] for _ in rows] for span in self.spans}
        done = [0] * len(rows)
        before: list[Tensor | None] = [None] * len(rows)  # [D] the target's state of the position before
        first_kept = 0 if keep_last is None else len(schedule) - keep_last
        for number, counts in enumerate(schedule):
            for name, logits in self._step(rows, done, counts, blocks, pages, before).items():
                for b, count in enumerate(counts if number >= first_kept else ()):
                    found[name][b].append(logits[b, :count].cpu())
            done = [start + count for start, count in zip(done, counts, strict=True)]
        return {name: [torch.cat(parts) for parts in per_row] for name, per_row in found.items()}

    def _step(
        self,
        rows: Sequence[Tensor],
        done: list[int],
        counts: Sequence[int],
        blocks: Tensor,
        pages: list[Tensor],
        before: list[Tensor | None],
    ) -> dict[str, Tensor]:
        size, width = self.block_size, max(counts)
        x = torch.zeros(len(rows), width, dtype=torch.long)
        positions = torch.full_like(x, -1)
        for b, (start, count) in enumerate(zip(done, counts, strict=True)):
            x[b, :count] = rows[b][start : start + count]
            positions[b, :count] = torch.arange(start, start + count)
        block_table = blocks[:, : int(positions.max()) // size + 1].contiguous()
        slots = block_table.gather(1, positions.clamp(min=0) // size) * size + positions % size
        query = tuple(t.to(self.device) for t in (positions, torch.where(positions < 0, 0, slots), block_table))
        x = x.to(self.device)
        hidden: dict[str, Tensor] = {}
        for span in self.spans:
            x = hidden[span.name] = self.call(f"{span.name}.trunk", x, query, pages)
        context = torch.zeros_like(x)
        context[:, 1:] = x[:, :-1]
        for b, (count, state) in enumerate(zip(counts, before, strict=True)):
            if state is not None:
                context[b, 0] = state
            if count:
                before[b] = x[b, count - 1]
        for name in self.contexts:
            hidden[name] = torch.cat([hidden[name], context], dim=-1)
        return {span.name: self._head(span.name, hidden[span.name], query, pages) for span in self.spans}

    def new_pages(self, num_blocks: int) -> list[Tensor]:
        """k and v of every layer, for so many blocks beside the null block."""
        num_layers = 1 + max(layer for info in self.infos.values() for layer in info.kv_layers)
        shape = (num_blocks + 1, self.block_size, self.num_kv_heads, self.head_dim)
        return [torch.zeros(shape, dtype=self.dtype, device=self.device) for _ in range(2 * num_layers)]

    def call(self, name: str, x: Tensor, query: tuple[Tensor, ...], pages: list[Tensor]) -> Tensor:
        """A program over pages; query: positions [B, T], slots [B, T], block_table [B, M]."""
        kv = [pages[2 * layer + i] for layer in self.infos[name].kv_layers for i in (0, 1)]
        return self.programs[name](x, *query, kv)

    def _head(self, name: str, hidden: Tensor, query: tuple[Tensor, ...], pages: list[Tensor]) -> Tensor:
        exit_, unembed = f"{name}.exit", f"{name}.unembed"
        if self.infos[exit_].kv_layers:
            states = self.call(exit_, hidden, query, pages).flatten(0, 1)
        else:
            states = self.programs[exit_](hidden.flatten(0, 1))
        logits = self.programs[unembed if unembed in self.programs else "unembed"](states)
        return logits.view(*hidden.shape[:2], -1)


@torch.no_grad()
def check(caller: Caller, rows: Sequence[Tensor], reference: Reference, max_batch: int = 16) -> list[TierParity]:
    """Every tier within what is allowed and finite, alone, in a ragged batch and in the widest call that there may be
    (its largest logits apart); ParityError says what is not.

    Args:
        rows: of `ROW_LENGTHS`, as `calibration_rows` makes them.
        max_batch: rows of the widest call; these are the beginnings of `rows` in turn.
    """
    alone, ragged = caller.run(rows[:1], ALONE), caller.run(rows, RAGGED)
    numbers = [b % len(rows) for b in range(max_batch)]
    wide = caller.run([rows[n][: sum(WIDE)] for n in numbers], [[count] * max_batch for count in WIDE], keep_last=1)
    report = []
    for tier, wanted in reference.logits.items():
        ends = [wanted[n][sum(WIDE[:-1]) : sum(WIDE)] for n in numbers]
        got = torch.cat(alone[tier] + ragged[tier] + wide[tier]).float()
        expected = torch.cat([wanted[0], *wanted, *ends]).float()
        assert got.shape == expected.shape, (tier, got.shape, expected.shape)
        error, allowed = relative_error(got, expected), reference.allowed[tier]
        # Not of the widest call, which repeats so few positions that one tie among them would be a third of it
        num_apart = len(got) - len(numbers)
        agreement, least = top1_agreement(got[:num_apart], expected[:num_apart]), 1 - reference.max_flips[tier]
        if not error <= allowed:  # NaN too
            raise ParityError(
                f"tier {tier}, {caller.dtype}: logits differ from the model's by {error:.2e} of their scale, at most "
                f"{allowed:.1e} is allowed (top-1 agreement {agreement:.1%}); no artifact was written"
            )
        if agreement < least:
            raise ParityError(
                f"tier {tier}, {caller.dtype}: {agreement:.1%} of its largest logits are the model's, at least "
                f"{least:.1%} are expected (error {error:.2e}); no artifact was written"
            )
        report.append(
            TierParity(
                tier=tier,
                max_error=error,
                allowed=allowed,
                top1_agreement=agreement,
                least_agreement=least,
                num_positions=len(got),
            )
        )
    return report


def calibration_rows(vocab_size: int, tokenizer: Any = None) -> list[Tensor]:
    """Rows of `ROW_LENGTHS` token ids: prose where there is a tokenizer, else ids that are drawn."""
    if tokenizer is None:
        generator = torch.Generator().manual_seed(0)
        return [torch.randint(vocab_size, (length,), generator=generator) for length in ROW_LENGTHS]
    ids = torch.tensor(tokenizer(_TEXT)["input_ids"])
    starts = [sum(ROW_LENGTHS[:i]) for i in range(len(ROW_LENGTHS))]
    return [
        ids[torch.arange(start, start + length) % len(ids)] for start, length in zip(starts, ROW_LENGTHS, strict=True)
    ]


_TEXT = """\
The lighthouse keeper wrote down the weather three times a day, because the ships that passed could not ask him.
On clear mornings he counted 14 sails; in fog he counted only the bells. "What do you do all winter?" a child once
asked. He thought about it, and said: I mend the nets, I read the same four books, and I wait for the ice to break.
def area(radius):
    return 3.14159 * radius ** 2
The answer to 12 + 30 is 42, and the capital of France is Paris.
"""
