"""The linear parts of heads in closed form: against a solver that sees all states at once."""

import pytest
import torch

from tests.tiny_models import make_tiny_model
from train.chat import Encoded
from train.closed_form import fit_linear_parts, linear_parts
from train.context import after_prompt, context_states, tokens_back
from train.heads import ExitConfig
from train.model import EarlyExitModel
from train.module import EarlyExitModule

LAYERS = 6


def rows_of(num_rows: int = 30, length: int = 40) -> list[Encoded]:
    generator = torch.Generator().manual_seed(0)
    mask = [False] * 3 + [True] * (length - 3)
    return [Encoded(torch.randint(100, (length,), generator=generator).tolist(), mask) for _ in range(num_rows)]


def model_of(**exit_: object) -> EarlyExitModel:
    return EarlyExitModel(make_tiny_model("llama"), [ExitConfig(name="draft", **{"layer": 2} | exit_)]).eval()


@pytest.mark.parametrize(("head", "context"), [("linear", 0), ("linear_layer", 0), ("layer", 3), ("linear_layer", 3)])
def test_they_equal_a_solver_that_sees_all_states_at_once(head: str, context: int) -> None:
    model, rows = model_of(head=head, context=context), rows_of()
    fit = fit_linear_parts(model, rows, 10**9)["draft"]
    draw = torch.Generator().manual_seed(0)
    below, wanted, contexts = [], [], []
    wanted_depth = LAYERS if head == "linear" else LAYERS - 1
    for row in rows:
        hidden = list(model.hidden_after(range(LAYERS + 1), torch.tensor([row.token_ids])))
        labels = slice(2, len(row.token_ids) - 1)
        below.append(hidden[2][0, labels])
        wanted.append(hidden[wanted_depth][0, labels])
        if context:
            positions = torch.arange(len(row.token_ids)).unsqueeze(0)
            back = tokens_back(positions, after_prompt(torch.tensor([row.loss_mask])), context, draw)
            states = model.heads["draft"].entry.context_norm(context_states(hidden[LAYERS], back, context))
            contexts.append(states[0, labels].detach())
    h, y = torch.cat(below).double(), torch.cat(wanted).double()
    features = ([h] if head != "layer" else []) + ([torch.cat(contexts).double()] if context else [])
    x = torch.cat(features, dim=1)
    penalty = torch.cat([f.square().sum(0).mean().expand(f.shape[1]) for f in features]) * fit.ridge
    rows_of_penalty = torch.diag(penalty.sqrt())
    want = torch.linalg.lstsq(
        torch.cat([x, rows_of_penalty]), torch.cat([y - h, torch.zeros(len(penalty), y.shape[1]).double()])
    ).solution.T
    got = torch.cat([linear.weight for linear in linear_parts(model.heads["draft"])], dim=1)
    torch.testing.assert_close(got, want.float(), atol=1e-5, rtol=1e-4)


def test_an_exit_whose_target_is_one_linear_map_away_agrees_at_once() -> None:
    """The layers between exit and last layer add nothing, so the last layer's own input is the exit's state."""
    base = make_tiny_model("llama")
    with torch.no_grad():
        for layer in base.model.layers[2:5]:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    model = EarlyExitModel(base, [ExitConfig(name="draft", layer=2, head="linear_layer")]).eval()
    torch.nn.init.normal_(model.heads["draft"].entry.linear.weight)  # a wrong beginning
    fit_linear_parts(model, rows_of(), 10**9)
    ids = torch.randint(100, (2, 12))
    out = model(ids)
    torch.testing.assert_close(out.exits["draft"], out.target, atol=2e-3, rtol=2e-3)


def test_no_more_rows_are_read_than_asked_for_and_heads_without_linear_parts_are_left_alone() -> None:
    rows = rows_of(8)
    poisoned = [*rows[:2], *(row._replace(token_ids=[10**6] * 40) for row in rows[2:])]
    assert list(fit_linear_parts(model_of(head="linear"), poisoned, 74)) == ["draft"]  # 2 × 37 labels
    with pytest.raises(IndexError):
        fit_linear_parts(model_of(head="linear"), poisoned, 75)
    assert fit_linear_parts(model_of(head="layer"), poisoned, 10**9) == {}
    assert fit_linear_parts(model_of(head="linear"), [], 10**9) == {}


def test_a_negative_number_of_labels_is_refused() -> None:
    with pytest.raises(ValueError, match=r"model\.closed_form_labels=-1 must be at least 0"):
        EarlyExitModule("unused", [ExitConfig(name="draft", layer=2)], closed_form_labels=-1)
