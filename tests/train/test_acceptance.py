import torch

from train.acceptance import Acceptance, run_lengths


def test_run_lengths_stop_at_a_mismatch_at_four_and_at_a_break():
    matches = torch.tensor([1, 1, 0, 1, 1, 1, 1, 1, 1, 1]).bool()
    breaks = torch.tensor([1, 0, 0, 0, 0, 0, 0, 0, 1, 0]).bool()
    assert run_lengths(matches, breaks).tolist() == [2, 1, 0, 4, 4, 3, 2, 1, 2, 1]


def test_acceptance_walks_rounds_as_the_engine_does():
    acceptance = Acceptance()
    judged = torch.zeros(10, dtype=torch.int64)
    drafted = torch.tensor([0, 0, 5, 0, 0, 0, 0, 0, 0, 0])
    breaks = torch.zeros(10, dtype=torch.bool)
    breaks[0] = True
    acceptance.update(drafted, judged, breaks)
    # rounds start at 0 (2 accepted), 3 (4 accepted), 8 (2 accepted, the text ends)
    assert (acceptance.num_accepted, acceptance.num_rounds) == (8, 3)
    assert acceptance.length == 1 + 8 / 3
    assert acceptance.agreement == 0.9
