"""The gate itself, and that every family passes it on both backends."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from export import parity
from export.parity import Caller, ParityError, Reference, calibration_rows, make_reference, reference_logits
from export.programs import tier_spans
from export.writer import ExportOptions, write_artifact
from tests.export.tiny_exits import ALL_HEADS, make_early_exit
from tests.tiny_engine import DEVICE
from tests.tiny_models import FAMILIES


def quick(*names: str) -> list[Any]:
    """All families, those that are not named for the slow tests alone."""
    return [pytest.param(family, marks=[] if family in names else [pytest.mark.slow]) for family in FAMILIES]


def caller_of(exported: Any) -> Caller:
    family = exported.model.family
    return Caller(
        programs=exported.programs,
        infos=exported.infos,
        spans=tier_spans(exported.model),
        contexts=[e.name for e in exported.model.exits if e.context],
        block_size=exported.artifact.manifest.block_size,
        num_kv_heads=family.num_kv_heads,
        head_dim=family.head_dim,
        dtype=torch.float32,
        device=DEVICE,
    )


def reference_of(model: Any, rows: list[torch.Tensor]) -> Reference:
    logits = reference_logits(model, rows)
    return make_reference(logits, logits)


@pytest.mark.parametrize("family", quick("llama", "opt"))  # they differ most
def test_every_family_and_head_passes_parity_in_eager(exported: Callable[..., Any], family: str) -> None:
    made = exported(family, "eager")  # export itself holds it to 1e-4
    rows = calibration_rows(made.model.family.vocab_size)
    report = parity.check(caller_of(made), rows, reference_of(made.model, rows))
    assert [tier.tier for tier in report] == ["first", "draft", "intermediate", "target"]
    assert all(tier.max_error <= 1e-4 for tier in report)


@pytest.mark.parametrize("family", quick())  # a minute of compilation each; the end-to-end test compiles one
def test_every_family_passes_parity_in_inductor(exported: Callable[..., Any], family: str) -> None:
    made = exported(family, "inductor")
    rows = calibration_rows(made.model.family.vocab_size)
    report = parity.check(caller_of(made), rows, reference_of(made.model, rows))
    assert all(tier.max_error <= 1e-4 for tier in report)
    kernels = made.infos["target.trunk"].num_kernels
    packed = kernels["packed_gemm"] + kernels["linear"]  # oneDNN's or ours, whichever the trial found faster here
    assert packed > 0 == kernels["library_gemm"], "Inductor ignored `freezing`: weights are not packed"


@pytest.mark.parametrize("family", ["llama", "qwen3", "opt", pytest.param("gemma3", marks=pytest.mark.slow)])
def test_exit_logits_of_a_second_chunk_equal_those_of_one_forward(exported: Callable[..., Any], family: str) -> None:
    """A24: an exit that lost the positions would only agree on the first chunk."""
    made = exported(family, "eager")
    row = calibration_rows(made.model.family.vocab_size)[0][:24]
    whole = reference_logits(made.model, [row])
    chunked = caller_of(made).run([row], [[12], [12]])
    for tier, logits in whole.items():
        error = (chunked[tier][0][12:] - logits[0][12:]).abs().max() / logits[0].abs().max()
        assert error < 1e-4, (tier, error)


def test_a_program_that_differs_is_an_error_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_early_exit("llama", ALL_HEADS[:1], num_hidden_layers=2)
    monkeypatch.setattr(parity, "MAX_ERROR", 0.0)
    with pytest.raises(ParityError, match="logits differ"):
        write_artifact(lambda dtype: model, None, ExportOptions(output=tmp_path / "artifact"))
    assert list(tmp_path.iterdir()) == []


def test_nan_is_an_error(exported: Callable[..., Any]) -> None:
    made = exported("llama", "eager")
    rows = calibration_rows(made.model.family.vocab_size)
    reference = reference_logits(made.model, rows)
    reference["draft"][0][3, 2] = float("nan")
    with pytest.raises(ParityError, match="tier draft"):
        parity.check(caller_of(made), rows, make_reference(reference, reference))


def test_a_norm_applied_twice_fails_the_gate(exported: Callable[..., Any]) -> None:
    """A23: hidden states that are already normalised."""
    made = exported("llama", "eager")
    rows = calibration_rows(made.model.family.vocab_size)
    caller = caller_of(made)
    exit_ = made.programs["target.exit"]
    twice = {**made.programs, "target.exit": lambda hidden: exit_(exit_(hidden))}
    broken = Caller(**{name: getattr(caller, name) for name in Caller.__dataclass_fields__} | {"programs": twice})
    with pytest.raises(ParityError, match="tier target"):
        parity.check(broken, rows, reference_of(made.model, rows))
