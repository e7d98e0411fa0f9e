"""`infer chat`: through pipes, with its commands, and stopped by Ctrl-C."""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from infer import LLM, SamplingParams
from infer.chat import Chat
from infer.cli import main
from infer.strategy import Policy
from infer.terminal import Splitter, printable
from tests.tiny_artifact import ON_DEVICE, load

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def llm(artifact: Path) -> LLM:
    return load(artifact, "hispec")


@pytest.fixture(scope="module")
def reference(artifact: Path) -> LLM:
    return load(artifact, "autoregressive")


def greedy(num_tokens: int = 4) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=num_tokens)


def said(llm: LLM, *lines: str, params: SamplingParams | None = None, **options: object) -> tuple[str, str, int]:
    """Answers, notes, and how many lines failed."""
    terminal = bool(options.get("shows_tiers"))
    out = Console(file=io.StringIO(), force_terminal=terminal, color_system="standard" if terminal else None)
    notes = Console(file=io.StringIO())
    chat = Chat(llm, params or greedy(), Policy(), out, notes, **options)
    chat.run(lines)
    return out.file.getvalue(), notes.file.getvalue(), chat.num_failed


def answer(llm: LLM, *talk: str, system: str | None = None, num_tokens: int = 4) -> str:
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(talk)]
    opening = [] if system is None else [{"role": "system", "content": system}]
    return llm.chat([*opening, *messages], greedy(num_tokens))[0].outputs[0].text


def test_turns_build_on_each_other_until_a_new_conversation(llm, reference):
    first = answer(reference, "Hi")
    second = answer(reference, "Hi", first, "So")
    assert said(llm, "Hi", "", "So", "/clear", "Hi")[0] == f"{first}\n{second}\n{first}\n"
    assert said(llm, "Hi", system="x")[0] == answer(reference, "Hi", system="x") + "\n"
    assert said(llm, " /Hi", "/quit", "Hi")[0] == answer(reference, "/Hi") + "\n"


def test_stats_tell_speed_and_acceptance_and_strategy_changes_it(llm, reference):
    out, notes, num_failed = said(llm, "Hi", "/stats", "/strategy", "/strategy layerskip", "Hi", "/stats")
    llm.use("hispec")
    first = answer(reference, "Hi")
    assert out == f"{first}\n{answer(reference, 'Hi', first, 'Hi')}\n" and num_failed == 0
    assert re.search(r"strategy hispec\nlast answer: 4 tokens · [\d.]+ tokens/s · .*target accepted \d+%", notes), notes
    assert "strategy layerskip\nlast answer: 4 tokens" in notes and "prompt_lookup" in notes


@pytest.mark.parametrize(
    ("line", "complaint"),
    [("/strategy magic", "strategy='magic' is not one of"), ("/what", "no command"), ("x" * 80, "leaves no room")],
)
def test_a_line_that_fails_says_why_and_the_talk_goes_on(llm, reference, line, complaint):
    out, notes, num_failed = said(llm, line, "Hi")
    assert complaint in notes and num_failed == 1
    assert out == answer(reference, "Hi") + "\n"


def test_ctrl_c_stops_the_answer_and_not_the_program(llm, reference, monkeypatch):
    step, num_steps = llm.engine.step, []

    def interrupted():
        num_steps.append(1)
        if len(num_steps) == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return step()

    monkeypatch.setattr(llm.engine, "step", interrupted)
    before = signal.getsignal(signal.SIGINT)
    out, notes, num_failed = said(llm, "Hi", "So", params=greedy(24))
    first, second = out.splitlines()[0], out.splitlines()[1:]
    assert answer(reference, "Hi", num_tokens=24).startswith(first) and "stopped" in notes and num_failed == 0
    assert second, "the second question was answered"
    assert signal.getsignal(signal.SIGINT) is before
    assert llm.engine.pool.num_free == llm.engine.pool.num_blocks - 1


def test_colours_change_nothing_but_colour(llm, reference):
    out, _, _ = said(llm, "Hi", shows_tiers=True, params=greedy(20))
    assert "\x1b[32m" in out or "\x1b[33m" in out
    plain = re.sub(r"\x1b\[[0-9;]*m", "", out)
    assert plain == printable(answer(reference, "Hi", num_tokens=20)) + "\n"


def test_a_model_sends_no_control_characters_to_a_terminal():
    assert printable("a\x1b]0;title\x07\tb\nc\x9b") == "a\ufffd]0;title\ufffd\tb\nc\ufffd"


def test_text_is_split_by_its_tokens():
    split = Splitter().split
    assert split("a b", [{"text": "a", "tier": "draft"}, {"text": "b", "tier": "target"}], False) == [
        ("a", "draft"), (" b", "target"),
    ]  # fmt: skip
    tokens = [
        {"text": text, "tier": tier} for text, tier in (("\ufffd", "draft"), ("\ufffd", "ngram"), ("x", "target"))
    ]
    assert Splitter().split("👍x", tokens, True) == [("👍", "draft"), ("x", "target")]


def test_through_pipes_it_gives_answers_alone_and_fails_if_a_line_did(artifact, reference):
    command = [sys.executable, "-m", "infer", "chat", str(artifact), *ON_DEVICE, "--max-tokens", "4"]
    lines = "Hi\n/stats\n/nothing\n"
    done = subprocess.run(command, cwd=ROOT, input=lines, capture_output=True, text=True, timeout=120)
    assert done.stdout == answer(reference, "Hi") + "\n"
    assert done.returncode == 1 and "tokens/s" in done.stderr and "/nothing is no command" in done.stderr


def test_from_a_script_it_reads_standard_input(artifact, reference, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hi\n"))
    arguments = [
        "chat",
        str(artifact),
        *ON_DEVICE,
        "--strategy",
        "hispec",
        "--max-tokens",
        "4",
        "--system",
        "x",
        "--colors",
    ]
    assert main(arguments) == 0
    assert capsys.readouterr().out == answer(reference, "Hi", system="x") + "\n"
