import math

import pytest
import torch

from train.step import Step


def finish(step, gradient, loss=1.0, num_tokens=4, undo=2.0):
    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor(gradient)
    step.add(torch.tensor(loss), num_tokens)
    step.finish({"w": parameter}, lambda sums: sums, undo)
    return parameter.grad


def test_the_gradient_of_sums_becomes_that_of_the_mean_over_all_micro_batches():
    step = Step(max_skipped=0)
    step.add(torch.tensor(1.0), 12)
    assert finish(step, [8.0, 16.0]).tolist() == [1.0, 2.0]  # 12 + 4 tokens, undo 2
    assert finish(step, [8.0, 16.0]).tolist() == [4.0, 8.0]


@pytest.mark.parametrize(("gradient", "loss"), [([math.nan, 1.0], 1.0), ([math.inf, 1.0], 1.0), ([1.0, 1.0], math.nan)])
def test_a_step_that_is_not_finite_is_left_out_and_counted(gradient, loss):
    step = Step(max_skipped=2)
    assert finish(step, gradient, loss) is None and finish(step, gradient, loss) is None
    assert finish(step, [1.0, 1.0]) is not None
    assert (step.num_skipped, step.num_skipped_in_a_row) == (2, 0)
    for _ in range(2):
        finish(step, gradient, loss)
    with pytest.raises(ValueError, match=r"3 optimizer steps in a row .*model\.max_skipped_steps=2"):
        finish(step, gradient, loss)


def test_a_step_without_tokens_is_left_out_and_is_no_fault():
    step = Step(max_skipped=0)
    assert finish(step, [0.0, 0.0], loss=0.0, num_tokens=0) is None
    assert step.num_skipped == 0
