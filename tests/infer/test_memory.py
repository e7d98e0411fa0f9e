"""`infer bench --memory`: what a fresh process measures of itself. How much that is depends on the system."""

import json
from pathlib import Path

import pytest

from infer import memory
from infer.artifact import Artifact
from infer.cli import main

pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="Linux's /proc")


def test_every_set_is_loaded_in_a_process_of_its_own(artifact: Path, tmp_path: Path, capsys) -> None:
    assert main(["bench", str(artifact), "--memory", "--json", str(tmp_path / "found.json")]) == 0
    (found,) = json.loads((tmp_path / "found.json").read_text())
    (name,) = (one.build.folder_name for one in Artifact.open(artifact).programs())
    assert found["name"] == name
    assert name in capsys.readouterr().out
    assert 0 < found["programs"] <= found["ready"]
    assert found["peak"] > 0
    assert found["model"] > 10_000


def test_a_process_that_fails_says_why(artifact: Path) -> None:
    opened = Artifact.open(artifact)
    sets = opened.programs()
    (artifact / "config.json").rename(artifact / "lost.json")
    try:
        with pytest.raises(RuntimeError, match=r"config\.json is missing"):
            list(memory.measure(opened, sets))
    finally:
        (artifact / "lost.json").rename(artifact / "config.json")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--batch-sizes", "1,2", "--max-tokens", "3"], "leave out --batch-sizes, --max-tokens"),
        (["--programs"], "leave out --programs"),
        (["--backend", "onnx"], "no programs for backend='onnx'"),
    ],
)
def test_what_it_can_not_measure_is_refused(artifact: Path, argv: list[str], words: str, capsys) -> None:
    assert main(["bench", str(artifact), "--memory", *argv]) == 2
    assert words in capsys.readouterr().err
