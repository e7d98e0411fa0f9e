"""Whose products with weights a package has: what the trial says of this processor."""

import torch

from export.cpu_kernels.trial import Trial, try_products


def test_a_request_s_time_decides() -> None:
    assert Trial(ours=(1.0, 10.0), theirs=(1.1, 10.0)).pays
    assert not Trial(ours=(1.0, 10.0), theirs=(1.1, 1.0)).pays, "tiles: 20 for prompts are more than 13 for tokens"
    assert Trial(ours=(1.0, 10.0), theirs=(1.2, 1.0)).pays
    assert "0.50 of the library's time for 4 tokens, 2.00 for 128" in str(Trial((1.0, 10.0), (2.0, 5.0)))


def test_it_times_every_matrix_by_both() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        trial = try_products([(48, 33), (7, 64), (300, 20)], dtype)
        assert all(seconds > 0 for times in trial for seconds in times)
