"""The third gate: exits must keep, as compiled programs, the acceptance that validation promised of them.

Counted twice, each time on one text for both sides. First on the text that the promise holds: every tier's programs are
run over its rows and counted by validation's own rule, as training did with the model. Then the engine answers the
beginnings of these rows with `layerskip`, and what its target accepts is held to that rule's count on the engine's own
answers: a fault in drafting (a context of another place, an exit's pages) costs acceptance and no token, so no other
gate sees it.

Only what falls short is a fault. Programs that agree more often than promised lose nothing, as every token is checked.
"""

# Shape legend: T tokens of a row, K places of a window, N labels of a row, D hidden, E exit size, S block size, V ids

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from export.parity import Caller, ParityError
from export.programs import TARGET
from infer.llm import LLM
from infer.manifest import ExitInfo
from infer.output import check_whole
from infer.params import SamplingParams
from infer.strategy import Policy
from train.acceptance import Acceptance
from train.batches import collate
from train.chat import Encoded
from train.context import after_prompt, always_back, context_states
from train.counting import answered
from train.linear_loss import top_ids
from train.promise import FILE, REMEDY, Promise

MAX_SHORTFALL = 2.0  # points, of one count against the other of the same rounds
NUM_PROMPTS, NUM_TOKENS = 24, 64  # of the engine's answers
BATCH_SIZE = 8
LEAST_PROMPT = 16  # tokens of a row without a prompt
OF = {"programs": "on its text its programs have", "engine": "on texts of its own the engine accepts"}
LOGITS_AT_ONCE = 64  # positions, [64, V]


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What one count says."""

    agreement: float | None  # at the first place of a window, over all labels; None: of rounds alone
    rates: list[float]  # [γ] share of rounds in which the first j + 1 drafts were accepted
    length: float  # mean acceptance length
    num_rounds: int

    @classmethod
    def of(cls, counted: Acceptance, *, only_rounds: bool = False) -> Rates:
        agreement = None if only_rounds else counted.agreement
        return cls(agreement=agreement, rates=counted.rates, length=counted.length, num_rounds=counted.num_rounds)

    @property
    def figures(self) -> list[float]:
        return self.rates if self.agreement is None else [self.agreement, *self.rates]

    def __str__(self) -> str:
        by_place = ", ".join(f"{100 * rate:.1f}" for rate in self.rates)
        agreement = "" if self.agreement is None else f"{self.agreement:.1%} of places and "
        return f"{agreement}{by_place} % of drafts by place"


@dataclass(frozen=True, kw_only=True)
class Kept:
    """One exit of one program set, against what was said of it."""

    exit: str
    by: Literal["programs", "engine"]  # on the promise's text, or on the engine's own
    expected: Rates
    found: Rates

    @property
    def shortfall(self) -> float:
        """The most that one figure lies below, in points; negative where all lie above."""
        return 100 * max(a - b for a, b in zip(self.expected.figures, self.found.figures, strict=True))

    @property
    def allowed(self) -> float:
        """Points. The engine's rounds and the rule's part where a draft falls differently in the last bits, and are
        other rounds from there on: a standard error of a share in so many is chance."""
        chance = 50 / self.found.num_rounds**0.5 if self.by == "engine" and self.found.num_rounds else 0.0
        return MAX_SHORTFALL + chance


@dataclass(frozen=True, kw_only=True)
class Counter:
    """Counts through programs as validation counts through the model.

    Args:
        caller: of the programs.
        exits: all but the target's, by depth.
        draft_vocabs: exit name → [V'] int64, of the trimmed ones.
        prefill_chunk: tokens of a call.
        max_model_len: of a text that the engine can hold.
    """

    caller: Caller
    exits: Sequence[ExitInfo]
    draft_vocabs: Mapping[str, Tensor]
    prefill_chunk: int
    max_model_len: int

    @torch.no_grad()
    def count(self, rows: Sequence[Encoded], num_draft_tokens: int, names: Sequence[str]) -> dict[str, Acceptance]:
        """Exit name → its drafts judged by the target, summed over the rows."""
        found = {name: Acceptance(num_draft_tokens) for name in names}
        exits = [e for e in self.exits if e.name in found]
        for row in rows:
            picks, breaks = self._picks(row, exits)
            for name, acceptance in found.items():
                acceptance.update(picks[name], picks[TARGET], breaks)
        return found

    def _picks(self, row: Encoded, exits: Sequence[ExitInfo]) -> tuple[dict[str, Tensor], Tensor]:
        """Exit name and `target` → picks [K, N] int64; breaks [N] bool, where a stretch of labels begins."""
        batch = collate([row])
        mask = batch.loss_mask[:, 1:]
        begins = mask & ~batch.loss_mask[:, :-1]
        labels = mask[0].nonzero().flatten().to(self.caller.device)  # the positions that predict them
        drafted = after_prompt(batch.loss_mask).to(self.caller.device)
        positions = torch.arange(len(row.token_ids), device=self.caller.device).unsqueeze(0)
        pages = self.caller.new_pages(-(-len(row.token_ids) // self.caller.block_size))
        x, hidden = batch.token_ids.to(self.caller.device), dict[str, Tensor]()
        for span in self.caller.spans:
            x = hidden[span.name] = self._paged(f"{span.name}.trunk", x, pages)
        picks = {TARGET: self._read_out(TARGET, self.caller.programs[f"{TARGET}.exit"](x[0, labels]))}
        longest = max(e.context for e in self.exits)
        for exit_ in exits:
            own = []
            # The places of a window, whose contexts differ; the last is that of all places behind them
            for place in range(1, (longest if exit_.context else 0) + 2):
                states = hidden[exit_.name]
                if exit_.context:
                    context = context_states(x, always_back(positions, drafted, place), exit_.context)
                    states = torch.cat([states, context], dim=-1)
                if exit_.has_kv:
                    states = self._paged(f"{exit_.name}.exit", states, pages)[0, labels]
                else:
                    states = self.caller.programs[f"{exit_.name}.exit"](states[0, labels])
                own.append(self._read_out(exit_.name, states))
            picks[exit_.name] = torch.stack(own)
        return picks, begins[mask].to(self.caller.device)

    def _paged(self, name: str, x: Tensor, pages: list[Tensor]) -> Tensor:
        """One row through a program over pages, chunk by chunk as a prompt: [1, T, ..] → [1, T, ..]."""
        size, length = self.caller.block_size, x.shape[1]
        parts = []
        for start in range(0, length, self.prefill_chunk):
            positions = torch.arange(start, min(start + self.prefill_chunk, length), device=x.device).unsqueeze(0)
            num_blocks = int(positions[0, -1]) // size + 1
            block_table = 1 + torch.arange(num_blocks, device=x.device).unsqueeze(0)
            slots = block_table[:, positions[0] // size] * size + positions % size
            # A slice keeps the strides of the whole, which a package that checks its inputs refuses
            part = x[:, start : start + self.prefill_chunk].clone(memory_format=torch.contiguous_format)
            parts.append(self.caller.call(name, part, (positions, slots, block_table), pages))
        return torch.cat(parts, dim=1)

    def _read_out(self, name: str, states: Tensor) -> Tensor:
        """[N, E] → the likeliest ids [N] int64."""
        own = f"{name}.unembed"
        program = self.caller.programs[own if own in self.caller.programs else "unembed"]
        return top_ids(states, program, self.draft_vocabs.get(name), LOGITS_AT_ONCE)


def check(counter: Counter, make_llm: Callable[[int, int], LLM], where: str, promise: Promise) -> list[Kept]:
    """Every exit on the promise's text, then the draft exit in the engine; ParityError where one falls short.

    Args:
        make_llm: (num_blocks, max_num_seqs) → the runtime over the same programs.
        where: what to call the programs.
    """
    rows, gamma = [row.encoded for row in promise.rows], promise.num_draft_tokens
    found = counter.count(rows, gamma, promise.exits)
    report = [
        Kept(exit=name, by="programs", expected=Rates.of(promise.acceptance(name)), found=Rates.of(found[name]))
        for name in promise.exits
    ]
    if prompts := choose_prompts(rows, counter.max_model_len):
        draft = promise.exits[0]
        engine, answers = serve(make_llm, prompts, gamma, counter.caller.block_size)
        counted = counter.count(answers, gamma, [draft])[draft]
        expected, served = Rates.of(counted, only_rounds=True), Rates.of(engine, only_rounds=True)
        report.append(Kept(exit=draft, by="engine", expected=expected, found=served))
    for kept in report:
        if not kept.shortfall <= kept.allowed:
            raise ParityError(
                f"{where}: exit {kept.exit} keeps less than validation promised: {OF[kept.by]} "
                f"{kept.found}, expected {kept.expected}; {kept.shortfall:.1f} points are missing, at most "
                f"{kept.allowed:.2g} are allowed; no artifact was written"
            )
    return report


def check_promise(promise: Promise, exits: Sequence[str], vocab_size: int, max_positions: int) -> None:
    """ValueError unless it is of these exits and of a base like this one."""
    if promise.exits != list(exits):
        raise ValueError(f"{FILE} promises of exits {promise.exits}, the heads have {list(exits)}; {REMEDY}")
    for number, row in enumerate(promise.rows):
        if max(row.token_ids) >= vocab_size or len(row.token_ids) > max_positions:
            raise ValueError(
                f"{FILE}: rows[{number}] has {len(row.token_ids)} tokens up to id {max(row.token_ids)}, the base takes "
                f"{max_positions} up to {vocab_size - 1}; {REMEDY}"
            )


def choose_prompts(rows: Sequence[Encoded], max_model_len: int) -> list[list[int]]:
    """Every row up to its first label, and up to the middle of what follows; as many as are asked."""
    found = list[list[int]]()
    for row in rows:
        first = max(row.loss_mask.index(True), min(LEAST_PROMPT, len(row.token_ids)))
        ends = dict.fromkeys((first, (first + len(row.token_ids)) // 2))
        found += [list(row.token_ids[:end]) for end in ends if end + NUM_TOKENS <= max_model_len]
    return found[:NUM_PROMPTS]


def serve(
    make_llm: Callable[[int, int], LLM], prompts: Sequence[list[int]], num_draft_tokens: int, block_size: int
) -> tuple[Acceptance, list[Encoded]]:
    """The engine's own count while it answers with layerskip, and the prompts with their answers."""
    longest = max(map(len, prompts)) + NUM_TOKENS + num_draft_tokens + 1
    llm = make_llm(1 + BATCH_SIZE * (1 + longest // block_size), BATCH_SIZE)
    llm.use("layerskip", Policy(num_draft_tokens=num_draft_tokens))
    outputs = llm.generate(list(prompts), SamplingParams(temperature=0, max_tokens=NUM_TOKENS, detokenize=False))
    check_whole(outputs)
    judged = [tier for output in outputs for tier in output.metrics.tiers]  # the target's alone
    num_rounds = sum(tier.num_drafts for tier in judged)
    accepted = [sum(sum(t.accepted_lengths[j + 1 :]) for t in judged) for j in range(num_draft_tokens)]
    texts = [list(output.outputs[0].token_ids) for output in outputs]
    counted = Acceptance(num_draft_tokens, num_rounds=num_rounds, accepted=accepted)
    return counted, answered(prompts, texts, NUM_TOKENS)
