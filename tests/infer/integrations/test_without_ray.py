"""What needs no Ray: mistakes that are told before any work, and the options of both commands."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow.parquet import write_table

from infer.integrations import ray as job
from infer.integrations import ray_serve
from infer.integrations.ray import _rows, generate_dataset
from infer.prompts import read_prompts
from infer.server.settings import Settings
from tests.conftest import ROOT


@pytest.fixture
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "ray" else find(name))


def test_without_ray_the_extra_is_named_before_any_work(no_ray, tmp_path, capsys):
    with pytest.raises(ValueError, match=r"needs the package ray: pip install 'hispec\[ray\]'"):
        generate_dataset(tmp_path / "no artifact", tmp_path / "no input", tmp_path / "out.jsonl")
    with pytest.raises(ValueError, match=r"pip install 'hispec\[ray\]'"):
        ray_serve.build_app("no artifact", Settings(model="x"))
    assert job.main(["in.jsonl", "out.jsonl", "--artifact", "none"]) == 2
    assert ray_serve.main(["--artifact", "none"]) == 2
    assert capsys.readouterr().err.count("pip install 'hispec[ray]'") == 2
    assert list(tmp_path.iterdir()) == []


def test_importing_infer_and_both_modules_imports_no_ray():
    program = (
        "import sys, infer, infer.llm, infer.integrations.ray, infer.integrations.ray_serve\n"
        "print(sorted(n for n in sys.modules if n.partition('.')[0] in ('ray', 'pandas', 'fastapi')))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


@pytest.fixture
def any_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infer.commands.options.need_packages", lambda *_: None)


@pytest.mark.usefixtures("any_ray")
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"actors": 0}, "actors=0 must be at least 1"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"output": "out.csv"}, "must end in .jsonl or .parquet"),
        ({"output": "nowhere/out.jsonl"}, "a folder that exists"),
        ({"artifact": "none"}, "no such folder"),
        ({"input": "none.jsonl"}, "none.jsonl: no such file"),
        ({"input": "twice.jsonl"}, "twice.jsonl:3 and twice.jsonl:1 have one id, 'a'"),
        ({"input": "broken.jsonl"}, "broken.jsonl:2: not JSON"),
        ({"input": "broken.parquet"}, "can't be read as Parquet"),
    ],
)
def test_mistakes_are_told_before_any_work(artifact, tmp_path, monkeypatch, change, reason):
    monkeypatch.chdir(tmp_path)
    Path("in.jsonl").write_text('{"prompt": "a"}\n')
    Path("twice.jsonl").write_text('{"id": "a", "prompt": "a"}\n{"prompt": "b"}\n{"id": "a", "prompt": "c"}\n')
    Path("broken.jsonl").write_text('{"prompt": "a"}\nHello\n')
    Path("broken.parquet").write_text("PAR2")
    before = sorted(tmp_path.iterdir())
    arguments: dict[str, Any] = {"artifact": artifact, "input": "in.jsonl", "output": "out.jsonl"} | change
    with pytest.raises(ValueError) as caught:
        generate_dataset(**arguments)
    assert reason in str(caught.value)
    assert sorted(tmp_path.iterdir()) == before


def test_parquet_rows_are_those_of_the_same_json_lines(tmp_path):
    messages = [{"role": "user", "content": "stones"}]
    records = [
        {"id": "x", "prompt": "Hello", "messages": None, "sampling_params": {"seed": 1, "top_p": None}},
        {"id": None, "prompt": None, "messages": messages, "sampling_params": None},
    ]
    write_table(pa.Table.from_pylist(records), tmp_path / "p.parquet")
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    lines, table = _rows(tmp_path / "p.jsonl"), _rows(tmp_path / "p.parquet")
    assert [row["id"] for row in table] == ["x", "p-2"]
    assert [row | {"where": ""} for row in table] == [row | {"where": ""} for row in lines]
    assert read_prompts(tmp_path / "p.parquet") == read_prompts(tmp_path / "p.jsonl")
    folder = tmp_path / "folder"
    folder.mkdir()
    for name in "ab":
        write_table(pa.Table.from_pylist([{"prompt": name}]), folder / f"{name}.parquet")
    assert [row["id"] for row in _rows(folder)] == ["a-1", "b-1"]


# ---- serve run's arguments ----


def test_serve_s_arguments_are_the_command_s_options():
    given = {"artifact": "x/tiny", "num_replicas": 2, "max-replicas": "4", "enforce_eager": "true", "bitwise": False}
    args = ray_serve.parse(given | {"log_prompts": False, "max_queue": 3})
    assert (args.artifact, args.num_replicas, args.max_replicas) == ("x/tiny", 2, 4)
    assert args.enforce_eager and not args.bitwise and not args.log_prompts and args.max_queue == 3
    assert ray_serve.settings_of(args).model == "tiny"


@pytest.mark.parametrize("given", [{}, {"artifact": "x", "replicas": 2}, {"artifact": "x", "num_replicas": "two"}])
def test_a_wrong_argument_of_serve_is_an_error_and_no_exit(given):
    with pytest.raises(ValueError, match="--help lists all options"):
        ray_serve.parse(given)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"num": 0}, "num_replicas=0"),
        ({"num": 3, "max_num": 2}, "max_replicas=2 must be at least num_replicas=3"),
        ({"target_ongoing_requests": 2.0}, "give max_replicas too"),
    ],
)
def test_replicas_that_can_t_be_are_refused(values, reason):
    with pytest.raises(ValueError, match=reason):
        ray_serve.Replicas(**values)


def test_options_out_of_a_mapping_have_lists_and_nothing():
    parsed = ray_serve.parse(
        {"artifact": "a", "api_key": ["k1", "k2"], "allowed_hosts": ["x", "y"], "max_replicas": None, "bitwise": False}
    )
    assert (parsed.api_key, parsed.allowed_hosts, parsed.max_replicas) == (["k1", "k2"], ["x", "y"], None)
    assert parsed.bitwise is False and ray_serve.parse({"artifact": "a", "api_key": "k"}).api_key == ["k"]


def test_an_id_with_half_a_character_is_refused_by_its_line(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text('{"id": "a", "prompt": "x"}\n{"id": "\\ud800", "prompt": "x"}\n')
    with pytest.raises(ValueError, match=r"in\.jsonl:2: id='\\ud800' holds half a character"):
        _rows(path)
