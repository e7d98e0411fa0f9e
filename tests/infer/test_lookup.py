"""Strategies that look up what comes next in the row's own text: what they propose, and what that leaves behind."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from infer.batch import RING_SIZE
from infer.params import SamplingParams
from infer.row import Row
from infer.strategy import Policy, stages_of
from tests.infer.test_invariants import entries, fresh_row, layered_model, paged
from tests.tiny_engine import Tiny, make_manifest, model_of

LOOP = (11, 12, 13, 14, 15, 16, 17)
LOOKUPS = ("prompt_lookup", "ngram_layerskip")


class Looping:
    """Target and exits go round `LOOP`, but for the positions in `breaks`, where the target has ids of their own."""

    rigs_target = True

    def __init__(self, breaks: tuple[int, ...] = ()) -> None:
        self.breaks = breaks

    def token(self, position: int) -> int:
        return 30 + self.breaks.index(position) if position in self.breaks else LOOP[position % len(LOOP)]

    def text(self, stop: int) -> list[int]:
        return [self.token(position) for position in range(stop)]

    def __call__(self, row: Row, tier: int, position: int, logits: Tensor) -> Tensor:
        token = self.token(position) if tier == len(row.cursors) - 1 else LOOP[position % len(LOOP)]
        return torch.zeros_like(logits).index_fill_(0, torch.tensor([token], device=logits.device), 10.0)


def widths_of(tiny: Tiny) -> list[int]:
    """Filled with the width of every call of a trunk from now on."""
    widths: list[int] = []
    for number, (program, *rest) in enumerate(tiny.runner._trunks):

        def counted(x, positions, *others, program=program):  # type: ignore[no-untyped-def]
            widths.append(positions.shape[1])
            return program(x, positions, *others)

        tiny.runner._trunks[number] = (counted, *rest)
    return widths


@pytest.mark.parametrize("strategy", LOOKUPS)
@pytest.mark.parametrize("k", [1, 3, 8])
def test_a_loop_is_committed_k_plus_one_tokens_at_a_time(strategy, k):
    rig = Looping()
    tiny = Tiny(model_of(), strategy, Policy(num_lookup_tokens=k), rig=rig)
    request = tiny.request(rig.text(16), SamplingParams(temperature=0, max_tokens=6 * (k + 1)))
    tiny.engine.add(request)
    tiny.engine.step()
    widths = widths_of(tiny)
    tiny.drain()
    assert request.token_ids == rig.text(16 + 6 * (k + 1))[16:]
    assert max(widths) == k + 1 == tiny.round.reach - (strategy == "ngram_layerskip" and k == 1)  # γ is 2
    (target,) = request.output().metrics.tiers
    assert (target.tier, target.num_drafts, target.num_draft_tokens, target.num_accepted) == ("target", 6, 6 * k, 6 * k)


@pytest.mark.parametrize("strategy", LOOKUPS)
def test_rows_with_and_without_a_find_share_a_round(strategy):
    """Two rows go round the loop, the texts of two others never repeat; each of them is counted for itself."""
    rig = Looping(breaks=(18, *range(40, 64)))
    tiny = Tiny(model_of(), strategy, rig=rig)
    prompts = [LOOP * 2, tuple(range(50, 64)), (*range(60, 99), LOOP[4]), LOOP * 2]
    got = tiny.generate(prompts, SamplingParams(temperature=0, max_tokens=20))
    for prompt, request in zip(prompts, got, strict=True):
        assert request.token_ids == rig.text(len(prompt) + 20)[len(prompt) :]
    accepted = [request.output().metrics.tiers[0].num_accepted for request in got]
    assert accepted[0] == accepted[3] > 10
    assert accepted[2] == 0
    num_drafted = got[2].output().metrics.tiers[0].num_draft_tokens
    assert num_drafted == 0 if strategy == "prompt_lookup" else num_drafted > 10


def test_prompt_lookup_runs_no_exit_below_the_target():
    tiny = Tiny(layered_model(), "prompt_lookup", rig=Looping())
    tiny.runner._exits[:2] = [None, None]
    assert tiny.round.judging_tiers == [2]
    (request,) = tiny.generate([LOOP * 3], SamplingParams(temperature=0, max_tokens=30))
    assert request.token_ids == Looping().text(51)[21:]


def test_prompt_lookup_needs_no_lower_tier():
    manifest = make_manifest(model_of())
    manifest = replace(manifest, tiers=[replace(manifest.tiers[-1], start=0)], exits=manifest.exits[-1:])
    assert [(s.tier, s.repeats) for s in stages_of("prompt_lookup", Policy(), manifest)] == [(0, 0), (0, 1)]
    with pytest.raises(ValueError, match="strategy='ngram_layerskip' needs 2 tiers, the artifact has 1"):
        stages_of("ngram_layerskip", Policy(), manifest)


@pytest.mark.parametrize("bitwise_range", [None, (2, 12)])
@pytest.mark.parametrize("k", [5, 8, 20])
def test_an_exit_that_looking_up_passes_over_catches_up_before_its_ring_wraps(k, bitwise_range):
    """A text that repeats for 240 tokens, and breaks off twice, so that the exit drafts with what it has missed."""
    num_prompt, length = 15, 255
    rig = Looping(breaks=(120, 200))
    tiny = Tiny(layered_model(), "ngram_layerskip", Policy(num_lookup_tokens=k), rig=rig, max_model_len=length,
                bitwise_range=bitwise_range)  # fmt: skip
    requests = [tiny.request(rig.text(n), SamplingParams(temperature=0, max_tokens=None)) for n in (num_prompt, 16)]
    for request in requests:
        tiny.engine.add(request)
    lags, caught_up = list[int](), 0
    while tiny.engine.has_unfinished:
        before = [r.row.exit_cursors[0] if r.row else 0 for r in requests]
        tiny.engine.step()
        tiny.engine.check_integrity()
        row = requests[0].row
        lags.append(len(row) - 1 - row.exit_cursors[0])
        if before[0] < row.exit_cursors[0] and not requests[0].is_finished:
            caught_up += 1
            other, fresh = fresh_row(tiny, row.token_ids)
            kv = zip(paged(tiny), paged(other), strict=True)
            ((pages, fresh_pages),) = [(a[2], b[2]) for a, b in kv if a[:2] == ("exit", 0)]
            stop = row.exit_cursors[0]
            torch.testing.assert_close(
                entries(pages, row, stop), entries(fresh_pages, fresh, stop), rtol=1e-4, atol=1e-5
            )
    for request in requests:
        start = len(request.prompt_token_ids)
        assert request.token_ids == rig.text(length)[start:]
    assert RING_SIZE - 2 * (k + 1) <= max(lags) < RING_SIZE, "neither too early nor too late"
    assert caught_up >= 5
