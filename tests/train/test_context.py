"""Which state of the target an exit with a context reads in training: windows as serving has them."""

import pytest
import torch

from tests.tiny_models import make_tiny_model
from train.context import context_states, tokens_back
from train.heads import ExitConfig, check_exits
from train.model import EarlyExitModel

LONGEST = 3


def rows_of(num_rows: int, length: int = 40) -> torch.Tensor:
    return torch.arange(length).expand(num_rows, length)


def test_a_window_counts_up_from_the_verified_token_and_may_end_without_a_context() -> None:
    positions = rows_of(32)
    back = tokens_back(positions, torch.ones_like(positions, dtype=torch.bool), LONGEST)
    assert set(back.flatten().tolist()) == {0, 1, 2, 3}
    for row in back.tolist():
        for before, now in zip(row[LONGEST + 1 :], row[LONGEST + 2 :]):
            # one further from the same token; a new window; or behind the longest one, where no context is
            assert now == before + 1 or now == 1 or (before, now) == (LONGEST, 0)
    lengths = {max(row) + (0 in row[LONGEST + 1 :]) for row in back.tolist()}
    assert lengths == {1, 2, 3, 4}, "every length of window occurs"


def test_a_prompt_and_a_rows_beginning_have_no_context() -> None:
    positions = torch.cat([torch.arange(5), torch.arange(7)]).unsqueeze(0).repeat(8, 1)  # two packed rows each
    drafted = torch.zeros_like(positions, dtype=torch.bool)
    drafted[:, 2:] = True
    back = tokens_back(positions, drafted, LONGEST)
    assert not back[:, :2].any()
    assert not back[:, 5].any(), "a packed row's first token would read another row"
    assert (back <= positions).all()
    assert back[:, 2:5].any() and back[:, 6:].any()
    assert not tokens_back(positions, None, LONGEST).any()


def test_windows_are_drawn_anew_in_training_alone() -> None:
    positions = rows_of(16)
    everywhere = torch.ones_like(positions, dtype=torch.bool)
    draw = torch.Generator().manual_seed(0)
    first, second = (tokens_back(positions, everywhere, LONGEST, draw) for _ in range(2))
    assert not torch.equal(first, second)
    assert torch.equal(tokens_back(positions, everywhere, LONGEST, torch.Generator().manual_seed(0)), first)
    fixed, again = (tokens_back(positions, everywhere, LONGEST) for _ in range(2))
    assert torch.equal(fixed, again)


def test_the_states_are_those_so_many_positions_back() -> None:
    last = torch.arange(24.0).view(2, 6, 2) + 1
    last[0, 5] = float("inf")  # as in padding, whose states may overflow; nobody is to read them
    back = torch.tensor([[0, 1, 2, 3, 1, 0], [0, 0, 1, 1, 4, 5]])
    got = context_states(last, back, reach=5)
    for b in range(2):
        for t in range(6):
            want = last[b, t - back[b, t]] if back[b, t] else torch.zeros(2)
            assert torch.equal(got[b, t], want)


@pytest.mark.parametrize("family", ["llama", "opt"])
def test_the_untrained_entry_is_the_layer_alone(family: str) -> None:
    base = make_tiny_model(family)
    plain, full = (
        EarlyExitModel(base, [ExitConfig(name="draft", layer=2, head=head, context=context)]).eval()
        for head, context in (("layer", 0), ("linear_layer", LONGEST))
    )
    ids = torch.randint(100, (2, 9))
    drafted = torch.ones_like(ids, dtype=torch.bool)
    assert torch.equal(full(ids, drafted=drafted).exits["draft"], plain(ids).exits["draft"])
    assert set(full.heads.state_dict()) - set(plain.heads.state_dict()) >= {
        "draft.entry.linear.weight",
        "draft.entry.context_linear.weight",
        "draft.entry.context_norm.weight",
    }


def test_the_context_reaches_the_exit_and_only_where_it_may() -> None:
    model = EarlyExitModel(make_tiny_model("llama"), [ExitConfig(name="draft", layer=2, context=LONGEST)]).eval()
    torch.nn.init.normal_(model.heads["draft"].entry.context_linear.weight)
    ids = torch.randint(100, (1, 9))
    drafted = torch.zeros_like(ids, dtype=torch.bool)
    without = model(ids).exits["draft"]
    assert torch.equal(model(ids, drafted=drafted).exits["draft"], without)
    drafted[:, 5:] = True
    got = model(ids, drafted=drafted).exits["draft"]
    assert torch.equal(got[:, :5], without[:, :5])
    assert not torch.isclose(got[:, 5:], without[:, 5:]).all(dim=-1).any()


@pytest.mark.parametrize(("head", "context"), [("linear", 2), ("native", 1), ("layer", -1)])
def test_a_context_needs_a_decoder_layer(head: str, context: int) -> None:
    with pytest.raises(ValueError, match=rf"exits\.draft\.context={context}.*layer and linear_layer"):
        check_exits([ExitConfig(name="draft", layer=2, head=head, context=context)], 6, 128)
