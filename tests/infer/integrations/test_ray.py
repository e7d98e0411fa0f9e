"""Ray Data over two local actors: every row exactly once, with the tokens of `LLM`, whatever dies on the way."""

from __future__ import annotations

import json
import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow.parquet import read_table, write_table

pytest.importorskip("ray", reason="needs the extra `ray`")

from infer import LLM, SamplingParams
from infer.integrations.answer_file import Counts
from infer.integrations.generator import ANSWERED
from infer.integrations.ray import JobStopped, generate_dataset, main
from tests.infer.integrations.processes import until, workers
from tests.tiny_engine import DEVICE

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("cluster")]

NUM_ROWS, BATCH_SIZE = 48, 4
PARAMS = SamplingParams(temperature=0.9, seed=3, max_tokens=24, ignore_eos=True)
ENGINE = {"strategy": "hispec", "device": str(DEVICE), "max_num_seqs": BATCH_SIZE}
TEXTS = [f"{number} small rivers" for number in range(NUM_ROWS)]
BAD = 17  # this row has no prompt


@pytest.fixture(scope="module")
def want(reference: LLM) -> list[list[int] | None]:
    """Tokens of each row; None for the bad one."""
    outputs = reference.chat([[{"role": "user", "content": text}] for text in TEXTS], PARAMS)
    tokens: list[list[int] | None] = [list(output.outputs[0].token_ids) for output in outputs]
    tokens[BAD] = None
    return tokens


def rows() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [{"id": f"row {number}", "prompt": text} for number, text in enumerate(TEXTS)]
    found[BAD]["prompt"] = " "
    return found


def lines(path: Path) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows()))
    return path


def run(artifact: Path, input: Path, output: Path, **more: Any) -> Counts:
    return generate_dataset(
        artifact,
        input,
        output,
        sampling_params=PARAMS,
        engine=ENGINE,
        actors=2,
        batch_size=BATCH_SIZE,
        num_cpus=0.5,
        **more,
    )


def check(answers: list[dict[str, Any]], want: list[list[int] | None]) -> None:
    """Every row exactly once, in the input's order."""
    assert [answer["id"] for answer in answers] == [f"row {number}" for number in range(NUM_ROWS)]
    assert [answer["token_ids"] for answer in answers] == want
    assert [number for number, answer in enumerate(answers) if answer["error"]] == [BAD]


def kill_one_in_mid_job(partial: Path) -> set[int]:
    """Process ids of both actors, one of which is killed after some rows were written and long before the last."""
    until(lambda: partial.exists() and partial.read_bytes().count(b"\n") >= BATCH_SIZE, "the first rows")
    until(lambda: len(workers("Generator")) == 2, "both actors")
    both = workers("Generator")
    until(lambda: bool(workers("Generator)).submit")), "an actor at work")
    os.kill(min(workers("Generator)).submit")), signal.SIGKILL)
    assert partial.read_bytes().count(b"\n") < NUM_ROWS - 2 * BATCH_SIZE, "too late: the job was all but done"
    return both


def test_a_killed_actor_loses_nothing(shared_artifact, want, tmp_path):
    output = tmp_path / "out.parquet"
    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(run, shared_artifact, lines(tmp_path / "in.jsonl"), output)
        both = kill_one_in_mid_job(tmp_path / "out.parquet.partial")
        until(lambda: job.done() or bool(workers("Generator") - both), "a new actor")
        assert not job.done(), "the job ended without the killed actor's rows"
        counts = job.result(timeout=300)
    assert counts == Counts(num_written=NUM_ROWS - 1, num_failed=1)
    table = read_table(output)
    assert table.schema.names == [name for name in ANSWERED.names if name != "number"]
    check(table.to_pylist(), want)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.parquet"]


def test_a_stopped_job_is_gone_on_with(shared_artifact, want, tmp_path):
    source, output = tmp_path / "in.parquet", tmp_path / "out.jsonl"
    write_table(pa.Table.from_pylist(rows()), source)
    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(run, shared_artifact, source, output, max_restarts=0)
        kill_one_in_mid_job(partial := tmp_path / "out.jsonl.partial")
        with pytest.raises(JobStopped):
            job.result(timeout=300)
    kept = partial.read_bytes()
    assert not output.exists() and BATCH_SIZE <= kept.count(b"\n") < NUM_ROWS
    assert run(shared_artifact, source, output, resume=True) == (NUM_ROWS - 1, 1)
    assert output.read_bytes().startswith(kept)
    check([json.loads(line) for line in output.read_text().splitlines()], want)
    assert run(shared_artifact, source, output, resume=True) == (NUM_ROWS - 1, 1)  # at once: it is complete


def test_what_no_actor_can_do_stops_the_job_with_its_cause(shared_artifact, tmp_path, capfd):
    arguments = [str(lines(tmp_path / "in.jsonl")), str(tmp_path / "out.jsonl"), "--artifact", str(shared_artifact)]
    assert main([*arguments, "--cpus-per-actor", "0.5", "--strategy", "hispec", "--window", "1000"]) == 1
    assert "window" in capfd.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_the_command_says_what_became_of_the_rows(shared_artifact, tmp_path, capsys):
    source, output = lines(tmp_path / "in.jsonl"), tmp_path / "out.jsonl"
    arguments = [str(source), str(output), "--artifact", str(shared_artifact), "--cpus-per-actor", "0.5"]
    assert main([*arguments, "--max-tokens", "2", "--device", str(DEVICE)]) == 1
    assert f"47 written + 1 failed = 48 asked: {output}" in capsys.readouterr().err
    assert sys.modules["ray"].is_initialized(), "the caller's own connection was closed"
