"""`infer generate --output`: lines in the prompts' order, whatever interrupts the run."""

from __future__ import annotations

import errno
import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

from infer import LLM, SamplingParams
from infer.cli import main
from infer.prompts import read_prompts
from infer.text_file import TextFile
from tests.tiny_artifact import ON_DEVICE, load

GREEDY = SamplingParams(temperature=0, max_tokens=6)
TEXTS = ["Hello", "the sea", "A small river", "stones", "and", "people"]


@pytest.fixture(scope="module")
def llm(artifact: Path) -> LLM:
    return load(artifact, "layerskip", max_num_seqs=2)


@pytest.fixture
def use(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> LLM:
    """The command takes the engine that is loaded already."""
    monkeypatch.setattr("infer.commands.options.load_llm", lambda *_: llm)
    return llm


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.txt"
    path.write_text("\n".join(TEXTS))
    return path


def run(prompts: Path, *more: str) -> int:
    return main(["generate", "artifact", *ON_DEVICE, "--prompts", str(prompts), "--raw", "--max-tokens", "6", *more])


def interrupted_after(llm: LLM, monkeypatch: pytest.MonkeyPatch, num_prompts: int) -> None:
    """The next run is broken off by Ctrl-C once so many prompts are complete."""
    whole = llm.as_completed

    def broken_off(*arguments):
        for number, output in enumerate(whole(*arguments)):
            if number == num_prompts:
                raise KeyboardInterrupt
            yield output

    monkeypatch.setattr(llm, "as_completed", broken_off)


@pytest.mark.parametrize("more", [(), ("--n", "2", "--temperature", "1", "--seed", "3")])
def test_a_resumed_file_is_that_of_one_run(use, prompts, tmp_path, monkeypatch, capsys, more):
    whole, output = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    assert run(prompts, "--output", str(whole), *more) == 0
    with monkeypatch.context() as patch:
        interrupted_after(use, patch, 3)
        assert run(prompts, "--output", str(output), *more) == 130
    partial = tmp_path / "out.jsonl.partial"
    num_lines = len(partial.read_text().splitlines())
    assert not output.exists() and 0 < num_lines < len(whole.read_text().splitlines())
    with partial.open("a") as file:
        file.write('{"id": "torn')  # as a full disk leaves it
    assert run(prompts, "--output", str(output), *more) == 2
    assert "go on with --resume" in capsys.readouterr().err
    assert run(prompts, "--output", str(output), "--resume", *more) == 0
    assert output.read_bytes() == whole.read_bytes() and not partial.exists()
    assert "resumed:" in capsys.readouterr().err
    assert run(prompts, "--output", str(output), "--resume", *more) == 0
    assert "is complete: nothing to resume" in capsys.readouterr().err
    assert use.engine.pool.num_free == use.engine.pool.num_blocks - 1


def test_another_runs_rest_is_not_gone_on_with(use, prompts, tmp_path, capsys):
    output = tmp_path / "out.jsonl"
    output.with_name("out.jsonl.partial").write_text('{"id": "other-1", "text": ""}\n')
    assert run(prompts, "--output", str(output), "--resume") == 2
    assert "belongs to ('other-1', 0), these prompts give ('prompts-1', 0)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("ids", "reason"),
    [
        (["other-1"], "line 1 of {} belongs to ('other-1', 0), these prompts give ('prompts-1', 0) there"),
        ([f"prompts-{i}" for i in range(1, 4)], "{} has 3 texts, these prompts give 6"),
        ([f"prompts-{i}" for i in range(1, 8)], "line 7 of {} belongs to ('prompts-7', 0), these prompts give None"),
    ],
)
def test_a_whole_file_of_other_prompts_is_not_called_complete(use, prompts, tmp_path, capsys, ids, reason):
    output = tmp_path / "out.jsonl"
    written = "".join(json.dumps({"id": name, "text": ""}) + "\n" for name in ids)
    output.write_text(written)
    assert run(prompts, "--output", str(output), "--resume") == 2
    told = capsys.readouterr().err
    assert reason.format(output) in told and "name another --output" in told
    assert output.read_text() == written


def test_a_full_disk_keeps_what_was_complete(use, prompts, tmp_path, monkeypatch, capsys):
    output, write = tmp_path / "out.jsonl", TextFile.write

    def write_until_full(self, records):
        if records[0]["id"] == "prompts-3":

            class Full:
                def write(self, _):
                    raise OSError(errno.ENOSPC, "No space left on device")

                def close(self):
                    raise OSError(errno.ENOSPC, "No space left on device")

            self._file.close()
            self._file = Full()
        write(self, records)

    output.write_text("old\n")
    with monkeypatch.context() as patch:
        patch.setattr(TextFile, "write", write_until_full)
        assert run(prompts, "--output", str(output)) == 2
    assert "No space left on device" in capsys.readouterr().err
    assert output.read_text() == "old\n" and len((tmp_path / "out.jsonl.partial").read_text().splitlines()) == 2
    assert run(prompts, "--output", str(output), "--resume") == 0
    assert [json.loads(line)["id"] for line in output.read_text().splitlines()] == [f"prompts-{i}" for i in range(1, 7)]


@pytest.mark.parametrize("text", ["\n".join(TEXTS), "\n".join(json.dumps({"prompt": text}) for text in TEXTS)])
def test_standard_input_holds_texts_or_objects(text, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    rows = read_prompts(Path("-"))
    assert [row.text for row in rows] == TEXTS and rows[0].id == "stdin-1"


def test_from_standard_input_to_standard_output(use, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello\nthe sea\n"))
    assert run(Path("-")) == 0
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [record["text"] for record in records] == [
        o.outputs[0].text for o in use.generate(["Hello", "the sea"], GREEDY)
    ]


@pytest.mark.parametrize("more", [("--resume",), ("--resume", "--check", "--output", "x")])
def test_resume_needs_a_file_and_no_check(prompts, more, capsys):
    assert run(prompts, *more) == 2
    assert "--resume" in capsys.readouterr().err


def test_as_completed_survives_steps_of_others_and_being_closed(llm):
    outputs = []
    for number, output in llm.as_completed(TEXTS, GREEDY):
        outputs.append(number)
        assert output.finished
        list(llm.stream("Hello", GREEDY))  # its steps finish some of ours
    assert sorted(outputs) == list(range(len(TEXTS)))
    first = llm.as_completed(TEXTS, GREEDY)
    next(first)
    first.close()
    assert not llm.engine.has_unfinished and llm.engine.pool.num_free == llm.engine.pool.num_blocks - 1


def test_a_reader_that_has_gone_is_no_fault(artifact: Path) -> None:
    command = [sys.executable, "-m", "infer", "generate", str(artifact), "--prompt", "Hello", "--max-tokens", "4"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()  # as `head` does once it has its lines
        assert "Traceback" not in process.stderr.read()
    assert process.returncode == 141, "as the shell names a death by SIGPIPE"
