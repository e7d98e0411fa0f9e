"""LayerSkip's numbers against their closed forms, written out by hand from the paper."""

import math

import pytest
import torch

from train.layerskip import LayerSkip, dropout_rates, dropped_rows, exit_weights


def test_dropout_grows_exponentially_from_nothing_to_the_most():
    rates = dropout_rates(5, 0.2)
    assert rates == pytest.approx([0.2 * (math.exp(n * math.log(2) / 4) - 1) for n in range(5)])
    assert (rates[0], rates[-1]) == (0, pytest.approx(0.2))


def test_rows_are_dropped_one_by_one_as_often_as_the_rates_say():
    drawn = dropped_rows(5, 0.4, 20_000, torch.Generator().manual_seed(0))
    assert drawn.shape == (5, 20_000)
    assert drawn.double().mean(dim=1).tolist() == pytest.approx(dropout_rates(5, 0.4), abs=0.01)
    assert torch.equal(drawn, dropped_rows(5, 0.4, 20_000, torch.Generator().manual_seed(0)))


def test_the_weights_of_all_depths_are_those_of_the_paper():
    weights = exit_weights(LayerSkip(exit_scale=0.5, curriculum="all"), 4, 0, 100)
    raw = {2: 0.5 * 1, 3: 0.5 * 3, 4: 3 + 0.5 * 3}  # Σ i: 0, 1, 3; the last: L − 1 + scale · (0 + 1 + 2)
    assert weights == pytest.approx({depth: weight / 6.5 for depth, weight in raw.items()})


def test_rotational_comes_to_every_depth_once_in_a_rotation_and_to_the_last_layer_always():
    recipe = LayerSkip(curriculum="rotational", rotation=3)
    steps = [exit_weights(recipe, 8, step, 100) for step in range(6)]
    assert [sorted(step) for step in steps[:3]] == [[4, 7, 8], [2, 5, 8], [3, 6, 8]]
    assert steps[3:] == steps[:3]
    assert all(sum(step.values()) == pytest.approx(1) for step in steps)


def test_gradual_goes_down_and_is_done_at_half_of_the_run():
    recipe = LayerSkip(curriculum="gradual")
    depths = [sorted(exit_weights(recipe, 5, step, 80)) for step in (0, 9, 10, 20, 30, 40, 79)]
    assert depths == [[5], [5], [4, 5], [3, 4, 5], [2, 3, 4, 5], [2, 3, 4, 5], [2, 3, 4, 5]]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"max_dropout": 1.0}, r"layerskip\.max_dropout=1\.0"),
        ({"exit_scale": -1.0}, r"layerskip\.exit_scale=-1\.0"),
        ({"curriculum": "random"}, r"layerskip\.curriculum='random' must be one of rotational"),
        ({"rotation": 0}, r"layerskip\.rotation=0"),
        ({"lr": 0.0}, r"layerskip\.lr=0\.0"),
    ],
)
def test_a_wrong_recipe_is_refused(options, reason):
    with pytest.raises(ValueError, match=reason):
        LayerSkip(**options).check("model.layerskip")
