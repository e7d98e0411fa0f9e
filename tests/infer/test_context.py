"""Exits that read the target's state: which one the runtime gives them, position by position."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from infer.params import SamplingParams
from infer.rings import Rings
from infer.strategy import Policy
from tests.tiny_engine import PROMPTS, Tiny, hf_greedy, make_model
from train.heads import ExitConfig
from train.model import EarlyExitModel

GREEDY = SamplingParams(temperature=0, max_tokens=20)
ROWS = PROMPTS[:6]
REACH = 3


def model_with_contexts() -> EarlyExitModel:
    exits = [
        ExitConfig(name="draft", layer=1, head="linear_layer", context=REACH),
        ExitConfig(name="intermediate", layer=3, head="layer", context=REACH),
    ]
    model = make_model(exits=exits)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.heads.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator).to(parameter.device))
    return model


class Watched:
    """Every input of every exit with a context, as (row's tokens, position, target's cursor, context [D])."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[tuple[list[int], int, int, Tensor]] = []
        contexts_of = Rings.contexts

        def contexts(rings: Rings, rows: Sequence[Any], query: Any, reach: int) -> Tensor:
            found = contexts_of(rings, rows, query, reach)
            for row, positions, states in zip(rows, query.positions.tolist(), found, strict=True):
                for position, state in zip(positions, states, strict=True):
                    if position >= 0:
                        self.seen.append((list(row.token_ids), position, row.cursors[-1], state.clone()))
            return found

        monkeypatch.setattr(Rings, "contexts", contexts)


def target_states(model: EarlyExitModel, token_ids: list[int]) -> Tensor:
    """[T, D]: what the target leaves of them in one forward."""
    ids = torch.tensor([token_ids], device=model.base.device)
    with torch.no_grad():
        (last,) = model.hidden_after([model.family.num_layers], ids)
    return last[0]


@pytest.mark.parametrize("strategy", ["layerskip", "hispec"])
@pytest.mark.parametrize("bitwise_range", [None, (1, 4)])
def test_it_is_the_targets_state_of_the_last_verified_token(strategy, bitwise_range, monkeypatch):
    model, watched = model_with_contexts(), Watched(monkeypatch)
    tiny = Tiny(model, strategy, Policy(num_draft_tokens=4, window=5, inner_rounds=2), bitwise_range=bitwise_range)
    got = [r.token_ids for r in tiny.generate(ROWS, GREEDY)]
    assert got == [hf_greedy(model, p, 20) for p in ROWS]
    with_state = 0
    for token_ids, position, cursor, state in watched.seen:
        if not cursor <= position < cursor + REACH or cursor == 0:
            assert not state.any(), "too far, passed by the target already, or in a row of which it has seen nothing"
        else:
            torch.testing.assert_close(state, target_states(model, token_ids[:cursor])[-1], atol=1e-4, rtol=1e-4)
            with_state += 1
    assert with_state > 50
    distances = {position - cursor for _, position, cursor, _ in watched.seen}
    assert {0, 1, 2, 3} <= distances, "drafted positions of a window share the state before it"


def test_a_row_that_begins_behind_a_cached_prefix_has_none_until_the_target_has_run(monkeypatch):
    model, watched = model_with_contexts(), Watched(monkeypatch)
    tiny = Tiny(model, "layerskip", Policy(num_draft_tokens=2), enable_prefix_caching=True)
    prompt = tuple(range(40, 57))  # four whole blocks and one token, so that nothing is left to prefill
    (first,) = tiny.generate([prompt], GREEDY)
    watched.seen.clear()
    (second,) = tiny.generate([prompt], GREEDY)
    assert second.token_ids == first.token_ids
    assert any(cursor == 16 for _, _, cursor, _ in watched.seen), "the prefix was computed again"
    for token_ids, position, cursor, state in watched.seen:
        if cursor == 16:
            assert not state.any(), "the ring may hold another request's states"
        elif cursor <= position < cursor + REACH:
            torch.testing.assert_close(state, target_states(model, token_ids[:cursor])[-1], atol=1e-4, rtol=1e-4)


def test_the_exit_reads_it():
    """A head that passes the context on drafts what the target has said there: the token that it was given, again."""
    model = model_with_contexts()
    head, size = model.heads["draft"], model.family.hidden_size
    with torch.no_grad():
        head.entry.linear.weight.copy_(-torch.eye(size))  # forget the exit's own state
        head.entry.context_norm.weight.fill_(1.0)
        head.entry.context_linear.weight.copy_(torch.eye(size))
        for matrix in (head.layer.self_attn.o_proj, head.layer.mlp.down_proj):
            matrix.weight.zero_()
        head.norm.weight.copy_(model.family.final_norm().weight)
    drafted = []

    def rig(row: Any, tier: int, position: int, logits: Tensor) -> Tensor:
        if tier == 0 and row.cursors[-1] and position - 1 < row.cursors[-1] + REACH:
            drafted.append((int(logits.argmax()), row.token_ids[row.cursors[-1]]))
        return logits

    (request,) = Tiny(model, "layerskip", Policy(num_draft_tokens=2), rig=rig).generate(ROWS[1:2], GREEDY)
    assert request.token_ids == hf_greedy(model, ROWS[1], 20)
    said = [pair for pair in drafted if pair[1] in request.token_ids]
    assert len(said) > 20
    assert all(draft == token for draft, token in said)
