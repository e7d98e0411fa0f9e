"""`infer loadtest`: what it counts of a server, and what it says of one that fails."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from infer import load as load_module
from infer.cli import main
from infer.load import Load, Report, percentiles, run
from tests.infer.server.harness import on_port, served


def load(url: str, **changes: object) -> Load:
    return Load(**({"url": url, "num_clients": 8, "seconds": 0.5, "max_tokens": 4, "pid": os.getpid()} | changes))


def test_every_client_is_answered_whole_and_counted(llm):
    with served(llm) as one, on_port(one) as address:
        report = asyncio.run(run(load(address, num_clients=20)))
    assert report.is_good and report.statuses["200"] == len(report.totals) == len(report.firsts) >= 20
    assert all(0 < first <= total for first, total in zip(report.firsts, report.totals, strict=True))
    assert report.memory and report.memory[0][1] > 50  # MiB; this process has loaded PyTorch


def test_the_chunk_that_opens_a_stream_is_no_text(llm):
    with served(llm) as one, on_port(one) as address:
        one.slow_down(0.3)
        report = asyncio.run(run(load(address, num_clients=1, seconds=0.1)))
    assert report.firsts[0] > 0.3


def test_the_command_prints_and_writes_the_figures(llm, tmp_path, capsys):
    with served(llm, api_keys=("key",)) as one, on_port(one) as address:
        arguments = ["loadtest", address, "--clients", "3", "--minutes", "0.005", "--max-tokens", "2"]
        assert main([*arguments, "--api-key", "key", "--output", str(tmp_path / "load.json")]) == 0
        told = capsys.readouterr().out
        assert main(arguments) == 1  # without the key
    assert re.search(r"^\d+ × 200 in \d+ s, [\d.]+ a second\nfirst text: p50 [\d.]+ s, p99", told), told
    assert json.loads((tmp_path / "load.json").read_text())["statuses"].keys() == {"200"}
    assert re.search(r"\d+ × 401", capsys.readouterr().out)


def test_a_full_queue_and_a_dying_engine_are_seen(narrow):
    with served(narrow, max_queue=1) as one, on_port(one) as address:
        one.slow_down(0.02)
        report = asyncio.run(run(load(address)))
        assert not report.is_good and report.statuses["429"] > 0 < report.statuses["200"]


def test_a_fault_inside_of_a_stream_is_no_answer(llm, monkeypatch):
    def broken(*_):
        raise RuntimeError("out of luck")

    with served(llm) as one, on_port(one) as address:
        monkeypatch.setattr(llm.engine.runner, "_trunks", [(broken, *rest) for _, *rest in llm.engine.runner._trunks])
        report = asyncio.run(run(load(address, num_clients=2, seconds=0.1)))
    assert set(report.statuses) == {"error in a stream"} and not report.totals


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["http://127.0.0.1:9", "--minutes", "0.001"], "can't be reached"),
        (["nonsense", "--minutes", "0.001"], "can't be reached"),
        (["http://127.0.0.1:9", "--clients", "0"], "--clients=0 must be more than 0"),
    ],
)
def test_mistakes_are_one_line(arguments, complaint, capsys):
    assert main(["loadtest", *arguments]) == 2
    assert complaint in capsys.readouterr().err


def test_a_process_that_is_not_there_is_told_before_any_load(llm, capsys):
    ended = subprocess.Popen([sys.executable, "-c", ""])  # a zombie: nobody has waited for it yet
    try:
        for pid in (2**22 + 1, ended.pid):  # the first is more than Linux gives
            while pid == ended.pid and "VmRSS" in Path(f"/proc/{pid}/status").read_text():
                time.sleep(0.01)
            with served(llm) as one, on_port(one) as address:
                started = time.monotonic()
                assert main(["loadtest", address, "--clients", "1", "--minutes", "0.5", "--pid", str(pid)]) == 2
                assert time.monotonic() - started < 10
            assert f"--pid {pid}: " in capsys.readouterr().err
    finally:
        ended.wait()


def test_a_process_that_ends_under_load_leaves_the_report(llm, monkeypatch):
    monkeypatch.setattr("infer.load._BETWEEN_SAMPLES", 0.05)
    watched = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    samples, seen = load_module._resident_mib, itertools.count()

    def ends_after_three(pid):
        if next(seen) == 3:
            watched.kill()
            watched.wait()
        return samples(pid)

    monkeypatch.setattr("infer.load._resident_mib", ends_after_three)
    with served(llm) as one, on_port(one) as address:
        report = asyncio.run(run(load(address, num_clients=2, pid=watched.pid)))
    assert report.is_good and len(report.memory) == 3
    assert 0 < report.pid_ended < report.seconds and "its process was gone after 0 s" in report.text()


def test_growth_is_a_slope_after_the_warm_up():
    report = Report(seconds=100.0)
    report.memory = [(at, 500.0 if at < 25 else 600.0 + at / 60) for at in range(100)]
    assert report.growth == pytest.approx(1.0)
    assert Report(seconds=1.0).growth is None


def test_percentiles_are_nearest_ranks():
    assert percentiles(range(1, 101)) == {"p50": 50, "p99": 99, "max": 100}
    assert percentiles([]) == {} and percentiles([2.0])["p99"] == 2.0
