"""`--push-to-hub` and `train push`: what is pushed has a card, and its id stands for the folder from then on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml

import export.cli
import train.push
from export import bitwise
from export.artifact_card import artifact_card
from infer.artifact import Artifact
from tests.export.tiny_exits import make_early_exit
from train.base_model import load_base
from train.cli import main as train_main
from train.heads import ExitConfig
from train.model import EarlyExitModel
from train.promise import Promise, PromisedRow

EXITS = [ExitConfig(name="draft", layer=1, head="linear")]


@pytest.fixture
def heads(tmp_path: Path) -> Path:
    folder = tmp_path / "base"
    make_early_exit("llama", EXITS, num_hidden_layers=2).base.save_pretrained(folder)
    row = PromisedRow(token_ids=[1, 2, 3], labels=[(1, 3)], counts={"draft": [1, 2, 1, 1]})
    kept = Promise(rows=[row], num_draft_tokens=1, exits=["draft"])
    EarlyExitModel(load_base(str(folder)), EXITS).save_heads(tmp_path / "heads", promise=kept)
    return tmp_path / "heads"


def metadata_of(card: str) -> dict[str, object]:
    found: dict[str, object] = yaml.safe_load(card.split("---\n")[1])
    return found


def test_heads_are_pushed_with_a_card_of_their_figures_and_exported_by_their_id(
    heads: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pushed: list[tuple[Path, str, str]] = []
    monkeypatch.setattr(train.push, "check_login", lambda repo: None)
    monkeypatch.setattr(train.push, "push_folder", lambda *a: pushed.append(a[:3]) or "https://hub/me/exits")
    assert train_main(["push", "--checkpoint", str(heads), "--repo", "me/exits"]) == 0
    assert "python -m export --checkpoint me/exits" in capsys.readouterr().out
    ((folder, repo, card),) = pushed
    assert (folder, repo) == (heads, "me/exits") and "| draft | 1 | linear | all | 50.0% | 2.00 |" in card
    assert metadata_of(card)["library_name"] == "hispec" and "base_model" not in metadata_of(card)
    (heads / "README.md").write_text("# own words")
    assert train_main(["push", "--checkpoint", str(heads), "--repo", "me/exits"]) == 0
    assert pushed[1][2] == "# own words"

    asked: list[object] = []
    monkeypatch.setattr("infer.hub.find_folder", lambda name: asked.append(str(name)) or heads)
    monkeypatch.setattr("export.writer.write_artifact", lambda make, tokenizer, options, report: asked.append(options))
    assert export.cli.main(["--checkpoint", "me/exits", "--output", str(tmp_path / "artifact")]) == 0
    assert asked[0] == "me/exits" and asked[1].promise == Promise.read(heads)  # type: ignore[attr-defined]


def test_an_artifact_is_pushed_when_it_is_whole_and_only_when_asked(
    heads: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    events: list[str] = []

    def push(folder: Path, repo: str, card: str, message: str) -> str:
        assert Artifact.open(folder).path == folder
        assert "| draft | 0–1 | linear |" in card and f'LLM("{repo}", strategy="layerskip")' in card
        assert metadata_of(card)["tags"] == ["hispec", "speculative-decoding"]
        events.append("pushed")
        return "https://hub/me/mine"

    monkeypatch.setattr(bitwise, "SHAPES", bitwise.SHAPES[:2])
    monkeypatch.setattr("infer.hub.check_login", lambda repo: events.append(f"asked for {repo}"))
    monkeypatch.setattr("infer.hub.push_folder", push)
    (heads / "validation.json").unlink()
    arguments = ["--checkpoint", str(heads), "--output", str(tmp_path / "artifact"), "--backend", "eager"]
    assert export.cli.main([*arguments, "--max-model-len", "64"]) == 0 and events == []
    assert export.cli.main([*arguments, "--max-model-len", "64", "--overwrite", "--push-to-hub", "me/mine"]) == 0
    assert events == ["asked for me/mine", "pushed"]
    assert "LLM('me/mine') runs it" in capsys.readouterr().out
    assert export.cli.main(["--checkpoint", str(heads), "--hf-draft", str(tmp_path / "d"), "--push-to-hub", "a/b"]) == 2
    assert "--push-to-hub is for an artifact" in capsys.readouterr().err


@pytest.mark.slow
def test_a_card_tells_the_acceptance_that_export_has_measured(
    heads: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bitwise, "SHAPES", bitwise.SHAPES[:2])
    (heads / "validation.json").unlink()
    arguments = ["--checkpoint", str(heads), "--output", str(tmp_path / "artifact"), "--backend", "eager"]
    assert export.cli.main([*arguments, "--max-model-len", "64"]) == 0
    artifact = Artifact.open(tmp_path / "artifact")
    (name,) = (one.build.folder_name for one in artifact.programs())
    rates = {"agreement": 0.5, "rates": [0.4], "length": 1.4, "num_rounds": 3}
    found = [{"exit": "draft", "by": "engine", "found": rates, "expected": rates | {"length": 1.5}}]
    monkeypatch.setattr("export.artifact_card.read_parity", lambda _: {"acceptance": {name: found}})
    assert f"| `{name}` | draft | the engine's | 1.40 | 1.50 |" in artifact_card(artifact, "me/mine")
    assert torch.__version__ in name
