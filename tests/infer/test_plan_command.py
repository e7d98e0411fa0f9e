"""`python -m infer plan` from end to end over the tiny artifact, and what it refuses."""

import json
from pathlib import Path

import pytest

from infer import backends, calibration
from infer.artifact import PLAN, Artifact
from infer.cli import main
from infer.params import SamplingParams
from infer.plan import FORMAT_VERSION
from infer.strategy import Policy
from tests.infer.test_calibration import as_intermediate, slowed
from tests.infer.test_profile import Clock
from tests.tiny_artifact import ON_DEVICE, load

FEW = ["--num-prompts", "2", "--max-tokens", "20"]


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """A target that its intermediate exit replaces, and costs a thousand times as much."""
    clock, load_programs = Clock(), backends.load
    monkeypatch.setattr(calibration, "time", clock)
    monkeypatch.setattr(calibration, "MIN_GROUPS", 2)
    monkeypatch.setattr(
        backends,
        "load",
        lambda *args: slowed(
            as_intermediate(load_programs(*args)), clock, lambda n: 1.0 if n == "target.trunk" else 0.001
        ),
    )
    return clock


def test_it_writes_the_plan_prints_it_and_auto_follows_it(artifact: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    assert main(["generate", str(artifact), *ON_DEVICE, "--prompt", "Hello", "--max-tokens", "4"]) == 0
    assert "decoding plainly, without a plan" in capsys.readouterr().err
    assert main(["plan", str(artifact), *ON_DEVICE, *FEW, "--batch-sizes", "2,1,2"]) == 0
    shown = capsys.readouterr()
    record = json.loads((artifact / PLAN).read_text())
    assert [one["batch_size"] for one in record["entries"]] == [1, 2]
    assert record["sample"] == {
        "num_prompts": 2, "max_tokens": 20, "temperature": 0.0, "seed": None, "margin": 0.03
    }  # fmt: skip
    assert record["conditions"]["backend"] == "eager" and record["format_version"] == FORMAT_VERSION
    for one in record["entries"]:
        assert one["chosen"]["strategy"] == "hispec" and one["chosen"]["ratio"] > 1.5
        assert f"{one['chosen']['ratio']:.2f}" in shown.out
    assert "runner-up" in shown.out and "2 prompts, at most 20 tokens each" in shown.out
    assert "comparing, 2 of 2" in shown.err
    for one in record["entries"]:
        told = f"batch {one['batch_size']}: hispec, {one['chosen']['ratio']:.2f} of plain decoding's speed, in "
        assert told in shown.err
    assert {path.name for path in artifact.iterdir() if path.name.startswith((PLAN, "."))} == {PLAN}
    Artifact.open(artifact)

    args = ["generate", str(artifact), *ON_DEVICE, "--prompt", "Hello", "--prompt", "the sea", "--max-tokens", "20"]
    assert main([*args, "--check"]) == 0
    said = capsys.readouterr().err
    assert "check: 2 of 2 equal to plain decoding" in said and "intermediate" in said and "plainly" not in said
    llm = load(artifact)
    llm.generate("Hello", SamplingParams(temperature=0, max_tokens=4))
    chosen = record["entries"][0]["chosen"]
    assert (llm.strategy, llm.policy) == (chosen["strategy"], Policy(**chosen["policy"]))


def test_each_file_of_a_folder_is_planned_by_itself(artifact: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    data = tmp_path / "data"
    data.mkdir()
    for name in ("code", "news"):
        (data / f"{name}.jsonl").write_text(json.dumps({"prompt": f"some {name}"}) + "\n")
    args = ["plan", str(artifact), *ON_DEVICE, "--prompts", str(data), "--max-tokens", "20", "--batch-sizes", "1"]
    assert main([*args, "--by-workload"]) == 0
    shown = capsys.readouterr()
    assert "1 code" in shown.out and "1 news" in shown.out and "comparing, 4 of 4" in shown.err
    (entry,) = json.loads((artifact / PLAN).read_text())["entries"]
    assert {name: one["strategy"] for name, one in entry["by_workload"].items()} == {"code": "hispec", "news": "hispec"}
    generate = ["generate", str(artifact), *ON_DEVICE, "--prompt", "Hello", "--max-tokens", "4"]
    assert main([*generate, "--workload", "code"]) == 0
    capsys.readouterr()
    assert main([*generate, "--workload", "poems"]) == 2
    assert "workload='poems' is not in plan.json, which knows code, news" in capsys.readouterr().err
    bench = ["bench", str(artifact), *ON_DEVICE, "--prompts", str(data), "--max-tokens", "4", "--by-workload"]
    assert main([*bench, "--strategies", "layerskip"]) == 2
    assert "--by-workload is about the strategy auto" in capsys.readouterr().err
    assert main([*bench, "--strategies", "auto"]) == 0


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--batch-sizes", "1,x"], ["--batch-sizes='1,x'", "whole numbers"]),
        (["--batch-sizes", "0"], ["--batch-sizes=0", "at least 1"]),
        (["--batch-sizes", "1,32"], ["--batch-sizes=1,32", "--max-num-seqs=16"]),
        (["--window", "3"], ["--window", "leave them out"]),
        (["--num-draft-tokens", "3"], ["--num-draft-tokens", "leave them out"]),
        (["--by-workload"], ["--by-workload needs --prompts DIR"]),
        (["--margin", "-0.1"], ["--margin=-0.1", "at least 0"]),
        (["--margin", "nan"], ["--margin=nan", "at least 0"]),
        (["--temperature", "0.5"], ["plan compares sampled text only under --seed"]),
        (["--max-tokens", "0"], ["max_tokens", "0"]),
        (["--num-prompts", "0"], ["--num-prompts=0", "at least 1"]),
        (["--prompts", "/nowhere/prompts.jsonl"], ["/nowhere/prompts.jsonl", "no such file"]),
        (["--verification", "hope"], ["verification='hope'", "identity, rejection"]),
        (["--max-tokens", "1", "--batch-sizes", "1"], ["raise --max-tokens=1"]),
    ],
    ids=lambda value: " ".join(value),
)
def test_mistakes_are_named_with_value_and_remedy(artifact: Path, args: list[str], words: list[str], capsys) -> None:
    (artifact / PLAN).unlink(missing_ok=True)
    assert main(["plan", str(artifact), *ON_DEVICE, *args]) == 2
    error = capsys.readouterr().err
    assert all(word in error for word in ("error: ", *words)), error
    assert not (artifact / PLAN).exists()
