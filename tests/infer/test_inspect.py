"""`infer inspect`: every table tells what the records say."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from infer.artifact import Artifact, write_manifest
from infer.cli import main
from infer.manifest import BuildInfo, Manifest


def lines_of(folder: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    assert main(["inspect", str(folder)]) == 0
    return [" ".join(line.replace("│", " ").split()) for line in capsys.readouterr().out.splitlines()]


def test_tables_tell_what_the_artifact_holds(artifact: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = lines_of(artifact, capsys)
    build = Artifact.open(artifact).select("eager").build
    files = Artifact.open(artifact).manifest.files
    text = "\n".join(lines)
    assert "draft 0–2 draft layer 200 –" in lines and "target 4–6 target native 300 –" in lines
    assert any(line.startswith(build.folder_name) and line.endswith("yes") for line in lines)
    size = files["weights/float32/target.trunk.safetensors"].size / 1e6
    assert any(line.startswith("target.trunk 4–5") and f"{size:.2f}" in line for line in lines)
    assert any(line.startswith("draft.exit 6 ") for line in lines)
    assert "1.0e-04 100.00% 99.0%" in text, "the first gate"
    assert all(part in text for part in ("layerskip 6 of 6", "hispec 6 of 6", "6 of 6 144")), "the second gate"
    assert f"{sum(record.size for record in files.values()) / 1e6:.2f}" in text
    assert "no plan" in text and "made by" in text


def test_programs_of_another_place_and_an_older_export_are_shown_as_such(
    artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(artifact, tmp_path / "artifact")
    (path,) = folder.glob("programs/*/build.json")
    build = replace(BuildInfo.from_json(path.read_text()), torch_version="1.0.0")
    path.write_text(build.to_json())
    path.parent.rename(path.parent.with_name(build.folder_name))
    (folder / "parity.json").write_text('{"programs": {}}')
    write_manifest(folder, Manifest.from_json((folder / "hispec.json").read_text()))
    text = "\n".join(lines_of(folder, capsys))
    assert "torch_version is 1.0.0" in text and "no figures: texts that export's gate served" in text


def test_a_broken_report_is_one_line(artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = shutil.copytree(artifact, tmp_path / "artifact")
    (folder / "parity.json").write_text("[1")
    write_manifest(folder, Manifest.from_json((folder / "hispec.json").read_text()))
    assert main(["inspect", str(folder)]) == 2
    assert "parity.json: not valid JSON" in capsys.readouterr().err


@pytest.mark.parametrize("text", ['{"format_version": 0}', "{", '{"format_version": 2}'])
def test_a_plan_that_cannot_be_read_is_told_and_the_rest_shown(
    artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    folder = shutil.copytree(artifact, tmp_path / "artifact")
    (folder / "plan.json").write_text(text)
    shown = " ".join(lines_of(folder, capsys))
    assert "files, all as recorded" in shown and "plan.json can't be used" in shown and "python -m infer plan" in shown


def test_onnx_models_are_not_shown_with_eagers_weights_and_the_command_that_installs_its_package_is_whole(
    artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shutil.copytree(artifact, tmp_path / "artifact")
    (path,) = folder.glob("programs/*/build.json")
    build = replace(BuildInfo.from_json(path.read_text()), backend="onnx")
    shutil.copytree(path.parent, folder / "programs" / build.folder_name)
    (folder / "programs" / build.folder_name / "build.json").write_text(build.to_json())
    write_manifest(folder, Manifest.from_json((folder / "hispec.json").read_text()))
    monkeypatch.setattr("infer.manifest.package_version", lambda name: None)
    monkeypatch.setattr("infer.artifact_report.Console", lambda width, **options: Console(width=400, **options))
    lines = lines_of(folder, capsys)
    trunks = [line for line in lines if line.startswith("target.trunk ")]
    weights = f"{(folder / 'weights/float32/target.trunk.safetensors').stat().st_size / 1e6:.2f}"
    assert [line.split()[-2] for line in trunks] == [weights, "–"], "eager, then onnx"
    assert "not installed here: pip install 'hispec[onnx]'" in " ".join(lines)


@pytest.mark.parametrize(("drift", "says"), [({"kl": 0.5, "agreement": 0.25, "num_labels": 7}, "KL 0.5000 nats"),
                                             (None, "drift not measured")])  # fmt: skip
def test_a_new_reference_is_told(
    artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], drift: object, says: str
) -> None:
    folder = shutil.copytree(artifact, tmp_path / "artifact")
    manifest = Manifest.from_json((folder / "hispec.json").read_text())
    reference = {"mode": "lora", "trained_from": {"name": "old"}, "drift": drift}
    write_manifest(folder, replace(manifest, provenance=manifest.provenance | {"reference": reference}))
    text = " ".join(lines_of(folder, capsys))
    assert "made of 'old' by training with model.backbone=lora" in text and says in text
