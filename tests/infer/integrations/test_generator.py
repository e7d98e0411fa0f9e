"""What one worker of a batch job does with its rows, without any cluster."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from infer import LLM, SamplingParams
from infer.integrations.generator import ANSWERED, ASKED, Generator, merged
from infer.integrations.ray import _rows
from tests.tiny_artifact import MAX_MODEL_LEN, load
from tests.tiny_engine import DEVICE

ENGINE = {"strategy": "hispec", "device": str(DEVICE), "max_num_seqs": 2}
PARAMS = SamplingParams(temperature=0, max_tokens=6)


@pytest.fixture(scope="module")
def generator(artifact: Path) -> Generator:
    return Generator(str(artifact), ENGINE, PARAMS, False)


@pytest.fixture(scope="module")
def llm(artifact: Path) -> LLM:
    return load(artifact, "autoregressive")


def asked(tmp_path: Path, *rows: dict[str, Any]) -> pa.Table:
    path = tmp_path / "asked.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return pa.Table.from_pylist(_rows(path), ASKED)


def chat(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_rows_get_the_target_s_own_tokens_and_say_what_was_accepted(generator, llm, tmp_path):
    own = {"temperature": 1.0, "seed": 5, "max_tokens": 9}
    rows = [
        {"id": "one", "prompt": "Hello"},
        {"messages": chat("the sea")},
        {"id": 3, "prompt": "stones", "sampling_params": own},
        {"prompt": "and", "sampling_params": {"max_tokens": 3, "seed": None}},
    ]
    answers = generator(asked(tmp_path, *rows))
    assert answers.schema == ANSWERED
    got = answers.to_pylist()
    assert [row["id"] for row in got] == ["one", "asked-2", "3", "asked-4"]
    params = [PARAMS, PARAMS, SamplingParams(**own), SamplingParams(temperature=0, max_tokens=3)]
    want = llm.chat([chat("Hello"), chat("the sea"), chat("stones"), chat("and")], params)
    assert [row["token_ids"] for row in got] == [list(output.outputs[0].token_ids) for output in want]
    assert [row["text"] for row in got] == [output.outputs[0].text for output in want]
    assert [row["finish_reason"] for row in got] == [output.outputs[0].finish_reason for output in want]
    for row in got:
        assert row["error"] is None and row["num_tokens"] == len(row["token_ids"])
        assert [tier["tier"] for tier in row["acceptance"]] == ["intermediate", "target"]
    target = got[2]["acceptance"][1]
    assert 0 <= target["num_accepted"] <= target["num_draft_tokens"] and target["num_drafts"] > 0
    assert target["mean_acceptance_length"] == 1 + target["num_accepted"] / target["num_drafts"]


def test_raw_rows_have_no_template(artifact, llm, tmp_path):
    (got,) = Generator(str(artifact), ENGINE, PARAMS, True)(asked(tmp_path, {"prompt": "Hello"})).to_pylist()
    assert got["token_ids"] == list(llm.generate("Hello", PARAMS)[0].outputs[0].token_ids)


BAD = [
    ({"prompt": " "}, "the prompt is empty"),
    ({"text": "no prompt"}, "expected 'prompt'"),
    ({"prompt": "river " * MAX_MODEL_LEN}, "max_model_len is 64"),
    ({"messages": [{"role": "user"}]}, "text 'content'"),
    ({"prompt": "a", "sampling_params": {"temperature": -1}}, "temperature=-1"),
    ({"prompt": "a", "sampling_params": {"temprature": 1}}, "sampling_params.temprature is unknown"),
    ({"prompt": "a", "sampling_params": {"n": 2}}, "one row gives one text"),
    ({"prompt": "a", "sampling_params": "hot"}, "must be an object"),
    ({"prompt": "a", "sampling_params": {"structured_outputs": {"chioce": ["a"]}}}, "structured_outputs.chioce"),
    ({"prompt": "a", "sampling_params": {"logit_bias": {"x": 1}}}, "invalid literal"),
    ({"prompt": "a", "sampling_params": {"stop_token_ids": [10**6]}}, "stop_token_ids holds 1000000"),
]


@pytest.mark.parametrize(("row", "reason"), BAD)
def test_a_row_that_can_t_be_answered_says_why_and_holds_nobody_up(generator, tmp_path, row, reason):
    good = {"prompt": "Hello"}
    (alone,) = generator(asked(tmp_path, good)).to_pylist()
    first, bad, last = generator(asked(tmp_path, good, row, good)).to_pylist()
    assert reason in bad["error"] and bad["id"] == "asked-2"
    assert bad["text"] is bad["token_ids"] is bad["num_tokens"] is bad["finish_reason"] is None
    assert first["token_ids"] == last["token_ids"] == alone["token_ids"] and first["error"] is last["error"] is None


def test_a_batch_of_bad_rows_alone(generator, tmp_path):
    answers = generator(asked(tmp_path, *(row for row, _ in BAD))).to_pylist()
    assert len(answers) == len(BAD) and all(row["error"] for row in answers)


def test_a_text_that_a_fault_cuts_short_is_a_failed_row(artifact, tmp_path):
    broken = Generator(str(artifact), ENGINE, PARAMS, False)

    def broken_prefill(*_: object) -> None:
        raise RuntimeError("the program broke")

    broken._llm.engine.runner.prefill = broken_prefill
    (got,) = broken(asked(tmp_path, {"prompt": "Hello"})).to_pylist()
    assert got["finish_reason"] == "error" and "the program broke" in got["error"]


def test_a_row_s_values_replace_the_job_s_one_by_one():
    job = SamplingParams(temperature=0.5, top_p=0.9, seed=1)
    params = merged(job, {"top_p": 0.8, "seed": None, "logit_bias": {"7": 2.0}}, "here")
    assert params == SamplingParams(temperature=0.5, top_p=0.8, seed=1, logit_bias={7: 2.0})
    form = merged(job, {"structured_outputs": {"choice": ["yes", "no"], "regex": None}}, "here").structured_outputs
    assert form is not None and form.choice == ("yes", "no")
    assert merged(job, None, "here") is job


@pytest.mark.parametrize("raw", [False, True])
def test_half_a_character_fails_its_own_row_at_most(artifact, tmp_path, raw):
    worker = Generator(str(artifact), ENGINE, PARAMS, raw)
    answers = worker(asked(tmp_path, {"prompt": "\ud800x"}, {"prompt": "Hello"})).to_pylist()
    assert [a["number"] for a in answers] == [0, 1] and answers[1]["error"] is None
    assert not raw or answers[0]["error"]
