"""`infer bench`: what its figures are made of. Speed itself is never asserted."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from infer.bench import BASELINE, Contender, Result, run_bench, summary
from infer.cli import main
from infer.llm import LLM
from infer.params import SamplingParams
from infer.strategy import Policy

PROMPTS = [[5, 9, 3], [7, 8, 9, 10, 11], [20, 21]]
NAMES = ("autoregressive", "layerskip", "hispec")


@pytest.fixture(scope="module")
def llm(artifact: Path) -> LLM:
    return LLM(artifact)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.txt"
    path.write_text("Hello\nthe river\nA\n")
    return path


def result(contender: Contender, seconds: list[float], num_tokens: list[int], texts: list[list[int]]) -> Result:
    return Result(contender, seconds, num_tokens, texts)


def test_every_contender_runs_at_every_temperature_with_plain_decodings_tokens(llm: LLM) -> None:
    params = SamplingParams(seed=3, max_tokens=8, ignore_eos=True)
    results = run_bench(llm, PROMPTS, strategies=("hispec", "layerskip", "hispec"), batch_sizes=(1, 2),
                        params=params, policy=Policy(), temperatures=(0.0, 0.8))  # fmt: skip
    assert [r.contender for r in results] == [
        Contender(n, b, t) for b in (1, 2) for t in (0, 0.8) for n in ("autoregressive", "hispec", "layerskip")
    ]
    texts = {t: [out.outputs[0].token_ids for out in llm.generate(PROMPTS, SamplingParams(
        temperature=t, seed=3, max_tokens=8, ignore_eos=True))] for t in (0, 0.8)}  # fmt: skip
    assert texts[0] != texts[0.8]
    for r in results:
        assert [tuple(ids) for ids in r.token_ids] == texts[r.contender.temperature]
        assert set(r.acceptance.counts) == {"autoregressive": set(), "layerskip": {"target"}}.get(
            r.contender.name, {"intermediate", "target"}
        )


def test_acceptance_is_counted_for_each_temperature_alone(llm: LLM) -> None:
    def lengths(*temperatures: float) -> list[dict[str, float]]:
        params = SamplingParams(seed=3, max_tokens=8, ignore_eos=True)
        results = run_bench(llm, PROMPTS, strategies=NAMES, batch_sizes=(1,), params=params,
                            policy=Policy(), temperatures=temperatures)  # fmt: skip
        return [row["mean_acceptance_length"] for row in summary(results)]

    assert lengths(0.3, 1.0) == [*lengths(0.3), *lengths(1.0)]


def test_without_bits_every_strategy_runs_a_second_time_in_turn(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    ways = []
    generate = llm.generate

    def seen(*args):
        ways.append((llm.strategy, llm.engine.runner.bitwise))
        return generate(*args)

    monkeypatch.setattr(llm, "generate", seen)
    results = run_bench(llm, PROMPTS[:2], strategies=("layerskip",), batch_sizes=(1,), bitwise=(True, False),
                        params=SamplingParams(temperature=0, max_tokens=4), policy=Policy())  # fmt: skip
    turn = [(BASELINE, True), (BASELINE, False), ("layerskip", True), ("layerskip", False)]
    assert ways == [*turn, *turn, *turn[1:], turn[0]]  # warm-up, then a group each
    assert [(r.contender.name, r.contender.bitwise) for r in results] == turn
    assert llm.engine.runner.bitwise and llm.strategy == BASELINE


def test_ratios_compare_with_what_their_names_say() -> None:
    texts = [[1, 2], [3, 4], [5, 6]]
    plain = Contender(BASELINE, 1)
    results = [
        result(plain, [1.0, 1.0, 1.0], [10, 10, 10], texts),
        result(Contender(BASELINE, 1, bitwise=False), [0.5, 0.8, 1.0], [10, 10, 10], [[1, 2], [3, 9], [5, 6]]),
        # Two rows fill a batch; the third alone would draw its throughput down
        result(Contender(BASELINE, 2), [0.5, 9.0], [20, 10], texts),
        result(Contender(BASELINE, 4), [3.0], [30], texts),
        result(Contender(BASELINE, 1, 0.7), [2.0, 2.0, 2.0], [10, 10, 10], texts),
    ]
    rows = summary(results)
    assert [row["ratio_median"] for row in rows] == [1, 1.25, 1, 1, 1]
    assert [row["ratio_to_bitwise"] for row in rows] == [None, 1.25, None, None, None]
    assert [row["ratio_to_batch_1"] for row in rows] == [1, 1, 4, None, 1]
    assert [row["num_identical"] for row in rows] == [3, 2, 3, 3, 3]


def test_command_shows_the_columns_that_were_asked_for(artifact: Path, prompts: Path, tmp_path: Path, capsys) -> None:
    output = tmp_path / "bench.json"
    args = ["bench", str(artifact), "--prompts", str(prompts), "--max-tokens", "4", "--strategies", "layerskip"]
    assert main([*args, "--enable-prefix-caching", "--num-blocks", "40", "--max-num-prefill-tokens", "16"]) == 0
    out = capsys.readouterr().out
    assert not any(column in out for column in ("temperature", "bitwise", "to batch"))
    many = ["--temperatures", "0.5,1", "--seed", "1", "--batch-sizes", "1,3", "--identity-cost"]
    assert main([*args, *many, "--output", str(output)]) == 0
    rows = json.loads(output.read_text())["rows"]
    assert [(r["strategy"], r["batch_size"], r["temperature"], r["bitwise"]) for r in rows] == [
        (s, b, t, bits) for b in (1, 3) for t in (0.5, 1) for s in NAMES[:2] for bits in (True, False)
    ]
    assert all((row["ratio_to_bitwise"] is None) == row["bitwise"] for row in rows)
    assert all(row["ratio_to_batch_1"] > 0 for row in rows)
    assert "bitwise" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--temperatures", "0.3,x"], "must be numbers"),
        (["--temperatures", "0,0.7"], "only under --seed"),
        (["--temperatures", "-1"], "temperature=-1.0"),
        (
            ["--temperatures", "0,0.7", "--seed", "1", "--peers", "transformers", "--peer-model", "x"],
            "leave out all but",
        ),
        (["--identity-cost", "--no-bitwise"], "leave out --no-bitwise"),
        (["--num-blocks", "1"], "num_blocks=1"),
        (["--num-blocks", "-1"], "num_blocks=-1 must be a whole number"),
        (["--profile", "--temperatures", "0.3", "--verifications", "rejection"], "leave out --temperatures, --verif"),
        (["--verifications", "reject"], "verification='reject' is not one of"),
        (["--max-num-prefill-tokens", "0"], "max_num_prefill_tokens=0"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    artifact: Path, prompts: Path, capsys, options: list[str], reason: str
) -> None:
    assert main(["bench", str(artifact), "--prompts", str(prompts), *options]) == 2
    assert reason in capsys.readouterr().err


def test_help_needs_no_torch() -> None:
    program = "import sys, infer.cli; infer.cli._parser(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0


def test_the_rejection_rule_runs_beside_the_identity_rule(llm: LLM) -> None:
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=8, ignore_eos=True)
    results = run_bench(llm, PROMPTS, strategies=("layerskip",), batch_sizes=(1,), params=params, policy=Policy(),
                        verifications=("identity", "rejection", "rejection"))  # fmt: skip
    rows = summary(results)
    assert [(row["strategy"], row["verification"]) for row in rows] == [
        ("autoregressive", None), ("layerskip", "identity"), ("layerskip", "rejection")
    ]  # fmt: skip
    assert rows[1]["num_identical"] == 3  # the other has the law alone
    assert set(rows[2]["mean_acceptance_length"]) == {"target"}
    assert llm.verification == "identity"
