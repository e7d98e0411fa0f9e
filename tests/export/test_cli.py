"""What a user can do wrong: a clear line, exit code 2, and nothing written."""

import json
from pathlib import Path

import pytest
import torch

from export.cli import main
from infer.artifact import Artifact
from tests.export.tiny_exits import make_early_exit
from train.heads import ExitConfig

NATIVE = "model:\n  base: {base}\n  exits:\n    - {{name: draft, layer: 1, head: native}}\n"


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A tiny model's folder, without tokenizer."""
    folder = tmp_path / "base"
    make_early_exit("llama", [ExitConfig(name="draft", layer=1)], num_hidden_layers=2).base.save_pretrained(folder)
    return folder


@pytest.fixture
def config(tmp_path: Path, base: Path) -> Path:
    path = tmp_path / "native.yaml"
    path.write_text(NATIVE.format(base=base))
    return path


def test_native_exits_export_from_a_config(config: Path, base: Path, tmp_path: Path) -> None:
    output = tmp_path / "artifact"
    assert main(["--config", str(config), "--output", str(output), "--backend", "eager", "--max-model-len", "64"]) == 0
    artifact = Artifact.open(output)
    assert [(t.name, t.start, t.stop) for t in artifact.manifest.tiers] == [("draft", 0, 1), ("target", 1, 2)]
    assert artifact.manifest.limits.max_model_len == 64
    assert {t["tier"] for p in json.loads((output / "parity.json").read_text())["programs"].values() for t in p} == {
        "draft",
        "target",
    }
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_heads_of_a_checkpoint_export_with_their_vocabulary(base: Path, tmp_path: Path) -> None:
    from train.base_model import load_base
    from train.model import EarlyExitModel

    exits = [ExitConfig(name="draft", layer=1, head="linear", vocab_size=16)]
    EarlyExitModel(load_base(str(base)), exits, {"draft": torch.arange(16)}).save_heads(tmp_path / "heads")
    output = tmp_path / "artifact"
    arguments = ["--checkpoint", str(tmp_path / "heads"), "--output", str(output), "--backend", "eager"]
    assert main(arguments) == 0
    assert "draft.unembed" in Artifact.open(output).select("eager").build.programs
    assert main(arguments) == 2  # it exists now
    assert main([*arguments, "--overwrite"]) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--backend", "tensorrt"], "not built yet"),
        (["--backend", "tpu"], "expected some of eager, inductor, onnx"),
        (["--dtype", "int3"], "expected some of float32, bfloat16"),
        (["--device", "npu"], "must be 'cpu' or 'cuda'"),
        (["--max-model-len", "100000"], "must lie between 2 and 512"),
        (["--prefill-chunk", "20"], "multiple of --block-size 16"),
        (["--workers", "0"], "at least 1"),
        (["--autotune", "--workers", "2", "--dtype", "bfloat16", "--backend", "inductor"], "use --workers 1"),
        (["--autotune"], "bfloat16 programs of inductor alone"),
    ],
)
def test_a_wrong_option_is_refused_before_any_work(
    options: list[str], message: str, config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(tmp_path.iterdir())
    arguments = ["--config", str(config), "--output", str(tmp_path / "artifact"), "--backend", "eager", *options]
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error
    assert sorted(tmp_path.iterdir()) == before


def test_a_missing_compiler_is_refused(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert main(["--config", str(config), "--output", str(tmp_path / "artifact"), "--backend", "inductor"]) == 2
    assert "no-such-compiler" in capsys.readouterr().err


def test_an_untrained_head_is_refused(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "layer.yaml"
    path.write_text(NATIVE.format(base=base).replace("native", "layer"))
    assert main(["--config", str(path), "--output", str(tmp_path / "artifact")]) == 2
    assert "needs training" in capsys.readouterr().err


def test_a_folder_that_is_no_artifact_is_never_replaced(config: Path, base: Path) -> None:
    assert main(["--config", str(config), "--output", str(base), "--backend", "eager", "--overwrite"]) == 2
    assert (base / "config.json").is_file()
