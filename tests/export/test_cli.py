"""What a user can do wrong: a clear line, exit code 2, and nothing written."""

import gc
import json
import os
import signal
import sys
import time
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from export.backends import tensorrt
from export.cli import Source, load_model, main
from export.disk import check_space
from export.parity import ParityError
from export.writer import ExportOptions, write_artifact
from infer.artifact import Artifact
from tests.export.tiny_exits import make_early_exit
from train.heads import ExitConfig
from train.model import EarlyExitModel

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


# ---- interrupted ----


@pytest.fixture
def old(config: Path, tmp_path: Path) -> Path:
    """Something that stands where an artifact goes, and counts as one."""
    output = tmp_path / "out" / "artifact"
    output.mkdir(parents=True)
    (output / "hispec.json").write_text("old")
    return output


def export_over(old: Path, config: Path, *options: str) -> int:
    return main(["--config", str(config), "--output", str(old), "--backend", "eager", "--overwrite", *options])


def is_untouched(old: Path) -> bool:
    return (old / "hispec.json").read_text() == "old" and list(old.parent.iterdir()) == [old]


def test_a_full_disk_leaves_the_old_artifact_and_one_line(
    old: Path, config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("export.graphs.save_file", full)
    monkeypatch.setattr("tempfile.tempdir", str(old.parent.parent))
    before = sorted(old.parent.parent.iterdir())
    assert export_over(old, config) == 1
    assert "No space left on device; no artifact was written" in capsys.readouterr().err
    assert is_untouched(old) and sorted(old.parent.parent.iterdir()) == before


def test_sigterm_leaves_the_old_artifact_and_no_folder(
    old: Path, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, others = signal.getsignal(signal.SIGTERM), sorted(old.parent.parent.iterdir())

    def killed(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(10)  # never so long: the signal comes first
        raise AssertionError("SIGTERM did nothing")

    monkeypatch.setattr("export.parity.check", killed)
    monkeypatch.setattr("tempfile.tempdir", str(old.parent.parent))
    with pytest.raises(SystemExit) as stopped:
        export_over(old, config)
    assert stopped.value.code == 143
    assert is_untouched(old) and sorted(old.parent.parent.iterdir()) == others
    assert signal.getsignal(signal.SIGTERM) == before


def test_too_little_room_is_told_with_both_numbers_before_the_work(
    old: Path, config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("export.disk.shutil.disk_usage", lambda _: SimpleNamespace(free=10_000))
    monkeypatch.setattr("export.writer.export_program", None)  # the work
    assert export_over(old, config) == 2
    error = capsys.readouterr().err
    assert "are needed there, 0.00 GB are free" in error and "make room" in error
    assert is_untouched(old)


def test_room_is_summed_up_over_what_lies_on_one_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def needed(free: int, backends: list[str]) -> str:
        monkeypatch.setattr("export.disk.shutil.disk_usage", lambda _: SimpleNamespace(free=free))
        try:
            check_space(tmp_path / "not" / "yet", tmp_path, [4 * 10**9, 2 * 10**9], backends)
        except ValueError as error:
            return str(error)
        return ""

    assert needed(12 * 10**9, ["eager"]) == ""  # 6 kept, 6 on the way
    assert "about 12.00 GB are needed there, 11.90 GB are free" in needed(119 * 10**8, ["eager"])
    assert needed(30 * 10**9, ["eager", "inductor"]) == ""  # 12 kept, 6 + 3 · 4 on the way
    assert "about 30.00 GB" in needed(29 * 10**9, ["eager", "inductor"])
    assert "--output" in needed(10**9, ["eager"])


# ---- TensorRT ----


@pytest.mark.parametrize("backend", ["tensorrt", "eager,tensorrt"])
@pytest.mark.parametrize(
    ("has_package", "has_device", "words"),
    [
        (False, False, ["torch-tensorrt", "pip install torch-tensorrt==", "GPU"]),
        (True, False, ["no CUDA device", "NVIDIA's driver"]),
        (True, True, ["can't be imported", "libnvinfer"]),
    ],
)
def test_tensorrt_says_what_is_missing_before_any_work(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    backend: str, has_package: bool, has_device: bool, words: list[str],
) -> None:  # fmt: skip
    monkeypatch.setattr("importlib.util.find_spec", lambda name: SimpleNamespace() if has_package else None)
    monkeypatch.setattr("torch.cuda.is_available", lambda: has_device)
    monkeypatch.setitem(sys.modules, "torch_tensorrt", None)  # an import of it fails
    monkeypatch.setattr("export.cli.read_source", None)  # the work
    before = sorted(tmp_path.iterdir())
    assert main(["--config", str(config), "--output", str(tmp_path / "artifact"), "--backend", backend]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: backend tensorrt") and all(word in error for word in words)
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.tensorrt
def test_tensorrt_finds_all_it_needs_where_it_is_installed() -> None:
    import torch_tensorrt  # noqa: F401

    if torch.cuda.is_available():
        tensorrt.check_available("cuda", ["float32"])
    else:
        with pytest.raises(ValueError, match="no CUDA device"):
            tensorrt.check_available("cuda", ["float32"])


def test_the_models_weights_are_let_go_before_programs_are_built(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = list[weakref.ref[torch.Tensor]]()

    def make(dtype: str) -> EarlyExitModel:
        model = load_model(Source(str(base), None, [ExitConfig(name="draft", layer=1)], None), dtype)
        weights.extend(weakref.ref(parameter) for parameter in model.base.parameters())
        return model

    def stop(*_: object) -> None:
        assert weights and all(weight() is None for weight in weights)
        raise ParityError("stopped")

    monkeypatch.setattr("export.writer.build_programs", stop)
    gc.disable()  # it might run by chance
    try:
        with pytest.raises(ParityError, match="stopped"):
            write_artifact(make, None, ExportOptions(output=tmp_path / "artifact", dtypes=("bfloat16",)))
    finally:
        gc.enable()
