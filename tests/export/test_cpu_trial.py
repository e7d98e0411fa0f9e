"""Whose products with weights a package has: what the trial says of this processor."""

import pytest
import torch

from export.cpu_kernels import trial
from export.cpu_kernels.trial import Trial, try_products


def test_a_request_s_time_decides() -> None:
    assert Trial(ours=(1.0, 10.0), theirs=(1.1, 10.0)).pays
    assert not Trial(ours=(1.0, 10.0), theirs=(1.1, 1.0)).pays, "tiles: 20 for prompts are more than 13 for tokens"
    assert Trial(ours=(1.0, 10.0), theirs=(1.2, 1.0)).pays
    assert "0.50 of the library's time for 4 tokens, 2.00 for 128" in str(Trial((1.0, 10.0), (2.0, 5.0)))


@pytest.mark.parametrize("has_library", [True, False])
def test_it_times_every_matrix_by_both(monkeypatch: pytest.MonkeyPatch, has_library: bool) -> None:
    """Where oneDNN can't multiply bfloat16, PyTorch's own product stands for the library."""
    if not has_library:
        monkeypatch.setattr(trial, "_has_library", lambda dtype: False)
        monkeypatch.setattr(torch.ops.mkldnn, "_reorder_linear_weight", None)
    for dtype in (torch.float32, torch.bfloat16):
        tried = try_products([(48, 33), (7, 64), (300, 20)], dtype)
        assert all(seconds > 0 for times in tried for seconds in times)


def test_no_more_is_tried_than_memory_should_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    pack = trial.pack
    monkeypatch.setattr(trial, "pack", lambda weight: (seen.append(tuple(weight.shape)), pack(weight))[1])
    monkeypatch.setattr(trial, "MAX_BYTES", 4 * 64 * 20)
    try_products([(64, 8), (64, 12), (8, 8), (900, 900)], torch.float32)
    try_products([(900, 900), (30, 40)], torch.float32)
    assert seen == [(64, 8), (64, 12), (30, 40)], "as many as fit, the smallest at least"
