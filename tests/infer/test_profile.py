"""`infer bench --profile`: what is counted and where the time is put down. Speed itself is never asserted."""

import json
from pathlib import Path

import pytest

from infer import judging, profile
from infer.cli import main
from infer.llm import LLM
from infer.params import SamplingParams
from infer.profile import Overhead, StrategyOverhead, measure_overhead, measure_shares
from infer.strategy import Policy

NAMES = ("autoregressive", "layerskip", "hispec")
GREEDY = SamplingParams(temperature=0, max_tokens=12)


@pytest.fixture(scope="module")
def llm(artifact: Path) -> LLM:
    return LLM(artifact)


class Clock:
    """Time goes on only inside the artifact's programs and picks."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    thread_time = perf_counter

    def slow(self, function, seconds: float):
        def run(*args):
            self.now += seconds
            return function(*args)

        return run


def test_overhead_counts_the_calls_over_pages_of_rounds_that_accept_all(llm: LLM) -> None:
    programs = llm.engine.runner.programs
    results = measure_overhead(llm, NAMES, (1, 3), Policy(num_draft_tokens=2, window=4), num_steps=3)
    # Plain: three trunks. layerskip: the draft's trunk and exit twice, then three trunks. hispec: drafting and two
    # trunks twice, as 3 tokens do not fill the window, then three trunks.
    assert [r.strategy for r in results] == list(NAMES)
    assert [[one.calls_per_step for one in r.sizes] for r in results] == [[3, 3], [7, 7], [15, 15]]
    for result in results:
        assert [one.batch_size for one in result.sizes] == [1, 3]
        assert all(one.us_per_step > one.us_per_call > 0 for one in result.sizes)
    assert llm.engine.runner.programs == programs and not llm.engine.has_unfinished
    assert llm.engine.round.rule.pick is judging.pick


def test_stubs_have_the_shapes_and_dtypes_of_the_programs(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    runner, seen = llm.engine.runner, []
    stubs = profile._stubs(llm, 8, profile.Parts(float))
    for name in runner.programs:

        def both(*args, name=name, real=runner.programs[name]):
            out, stub = real(*args), stubs[name](*args)
            seen.append(name)
            assert (stub.shape, stub.dtype) == (out.shape, out.dtype), name
            return out

        monkeypatch.setitem(runner.programs, name, both)
    runner.bind(runner.programs, bitwise=True)
    for name in NAMES:
        llm.use(name)
        assert all(out.outputs[0].finish_reason != "error" for out in llm.generate([[5, 9, 3], [7, 8]], GREEDY))
    monkeypatch.undo()
    runner.bind(runner.programs, bitwise=True)
    assert set(seen) == set(runner.programs)


def test_rows_cost_the_slope_of_the_calls() -> None:
    one = StrategyOverhead("hispec", [Overhead(b, 0, 1, 40 + 3 * b) for b in (1, 8, 16)])
    assert one.us_per_row == pytest.approx(3)
    assert StrategyOverhead("hispec", one.sizes[:1]).us_per_row is None


def test_shares_put_each_programs_time_under_its_name(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, runner = Clock(), llm.engine.runner
    monkeypatch.setattr(profile, "time", clock)
    monkeypatch.setattr(profile, "pick", clock.slow(judging.pick, 2.0))
    before = runner.programs
    slow = {name: clock.slow(program, 3.0 if name == "unembed" else 1.0) for name, program in before.items()}
    runner.bind(slow, bitwise=True)
    step = llm.engine.step
    monkeypatch.setattr(llm.engine, "step", clock.slow(step, 4.0))
    try:
        (plain,) = measure_shares(llm, [[5, 9, 3]], ["autoregressive"], [2], GREEDY, Policy(), num_steps=3)
    finally:
        runner.bind(before, bitwise=True)
        llm.use("autoregressive")
    # 3 trunks, the target's exit, unembedding, a pick, and 4 that nobody claims
    parts = {f"{t}.trunk": 1 for t in ("draft", "intermediate", "target")}
    parts |= {"target.exit": 1, "unembed": 3, "sampling": 2, "host": 4}
    assert plain.ms_per_step == 13_000 and plain.tokens_per_step == 2
    assert plain.parts == {name: pytest.approx(seconds / 13) for name, seconds in parts.items()}


def test_a_batch_that_never_decodes_together_is_refused(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=1)
    with pytest.raises(ValueError, match="raise --max-tokens=1 or --num-blocks"):
        measure_shares(llm, [[5, 9, 3]], ["autoregressive"], [2], params, Policy())
    assert not llm.engine.has_unfinished


def test_command_prints_two_tables_and_writes_json(artifact: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(profile.measure_overhead, "__defaults__", (3,))
    monkeypatch.setattr(profile.measure_shares, "__defaults__", (3,))
    output = tmp_path / "profile.json"
    args = ["bench", str(artifact), "--profile", "--max-tokens", "16", "--output", str(output)]
    assert main([*args, "--batch-sizes", "1,2", "--temperature", "0.8"]) == 0
    record = json.loads(output.read_text())
    assert [(one["strategy"], len(one["sizes"])) for one in record["overhead"]] == [(name, 2) for name in NAMES]
    assert [(one["strategy"], one["batch_size"]) for one in record["shares"]] == [(n, b) for n in NAMES for b in (1, 2)]
    for one in record["shares"]:
        assert sum(one["parts"].values()) == pytest.approx(1) and 0 < one["parts"]["host"] < 1
    out = capsys.readouterr().out
    assert "µs a step" in out and "sampling" in out
    assert main(["bench", str(artifact)]) == 2
    assert "bench needs --prompts" in capsys.readouterr().err
