"""A batch job's file: complete or not there, in the input's order, and gone on with after an interruption."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import ArrowInvalid
from pyarrow.parquet import read_table, write_table

from infer.integrations import answer_file
from infer.integrations.answer_file import AnswerFile, Counts, finished_before

IDS = ["a", "b", "c", "d"]
BOTH = pytest.mark.parametrize("suffix", answer_file.SUFFIXES)


def row(name: str, error: str | None = None) -> dict[str, Any]:
    tier = {"tier": "target", "num_drafts": 1, "num_draft_tokens": 2, "num_accepted": 1, "mean_acceptance_length": 2.0}
    ran = {"text": f"text\u2028of {name}", "token_ids": [1, 2], "num_tokens": 2, "finish_reason": "length"}
    never = dict.fromkeys(ran)
    return {"id": name, **(never if error else ran), "acceptance": [] if error else [tier], "error": error}


ROWS = [row("a"), row("b", "too long"), row("c"), row("d")]


def read(path: Path) -> list[dict[str, Any]]:
    if path.suffix == ".parquet":
        return read_table(path).to_pylist()
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


@BOTH
def test_the_file_appears_whole_with_both_counts(tmp_path, suffix, monkeypatch):
    monkeypatch.setattr(answer_file, "_ROWS_AT_ONCE", 3)
    path = tmp_path / f"out{suffix}"
    with AnswerFile(path, IDS, resume=False) as file:
        for one in ROWS:
            file.write([one])
            assert not path.exists()
        assert file.finish() == Counts(num_written=3, num_failed=1)
    assert read(path) == ROWS
    assert list(tmp_path.iterdir()) == [path]
    assert finished_before(path, IDS) == (3, 1)
    with pytest.raises(ValueError, match="--resume"):
        finished_before(path, [*IDS[:3], "x"])


@BOTH
def test_an_interrupted_job_goes_on(tmp_path, suffix):
    path = tmp_path / f"out{suffix}"
    path.write_text("what was there before")
    with pytest.raises(KeyboardInterrupt), AnswerFile(path, IDS, resume=False) as file:
        file.write(ROWS[:2])
        raise KeyboardInterrupt
    assert path.read_text() == "what was there before" and finished_before(path, IDS) is None
    with pytest.raises(ValueError, match="go on with --resume"):
        AnswerFile(path, IDS, resume=False)
    with pytest.raises(ValueError, match=r"belongs to \('a', 0\)"):
        AnswerFile(path, IDS[::-1], resume=True)
    with AnswerFile(path, IDS, resume=True) as file:
        assert file.num_kept == 2
        file.write(ROWS[2:])
        assert file.finish() == (3, 1)
    assert read(path) == ROWS


def test_a_job_that_ends_before_its_first_row_leaves_nothing(tmp_path):
    with pytest.raises(ValueError, match="no room"), AnswerFile(tmp_path / "out.jsonl", IDS, resume=False):
        raise ValueError("no room")
    assert not list(tmp_path.iterdir())


@BOTH
def test_a_job_that_lost_rows_gives_no_file(tmp_path, suffix):
    path = tmp_path / f"out{suffix}"
    with AnswerFile(path, IDS, resume=False) as file:
        file.write(ROWS[:3])
        with pytest.raises(RuntimeError, match="has 3 rows, 4 were asked"):
            file.finish()
    assert not path.exists()


def test_parquet_that_can_t_be_written_leaves_nothing_half(tmp_path):
    path = tmp_path / "out.parquet"
    with AnswerFile(path, IDS[:1], resume=False) as file:
        file.write([row("a") | {"num_tokens": "two"}])
        with pytest.raises((ArrowInvalid, TypeError)):
            file.finish()
    assert [one.name for one in tmp_path.iterdir()] == ["out.parquet.partial"]


def test_the_name_says_the_format(tmp_path):
    with pytest.raises(ValueError, match=r"must end in \.jsonl or \.parquet"):
        AnswerFile(tmp_path / "out.csv", IDS, resume=False)


def test_a_parquet_file_of_something_else_is_not_gone_on_with(tmp_path):
    path = tmp_path / "out.parquet"
    write_table(pa.table({"prompt": ["x"]}), path)
    with pytest.raises(ValueError, match=r"--resume: .*out\.parquet has the answers to other rows"):
        finished_before(path, ["a"])
