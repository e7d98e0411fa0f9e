"""`infer bench`: what its figures are made of. Speed itself is never asserted."""

import json
import math
import subprocess
import sys
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import gguf
import numpy as np
import pytest
import torch
from rich.console import Console

from infer import bench_plots
from infer.bench import BASELINE, WARMUP_TOKENS, Contender, Result, run_bench, settings_of
from infer.bench_summary import exact_match, median_interval, summary
from infer.cli import main
from infer.commands import options
from infer.labels import label
from infer.llm import LLM
from infer.params import SamplingParams
from infer.peers import Peer
from infer.peers.gguf import write as write_gguf
from infer.plan import Figure, PlanEntry
from infer.profile import Overhead, Shares, StrategyOverhead
from infer.report import print_profile, print_workloads
from infer.strategy import Policy, Setting
from tests.tiny_models import make_tiny_model

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


def test_the_drafting_of_adadecode_is_timed(llm: LLM) -> None:
    params, policy = SamplingParams(temperature=0, max_tokens=8), Policy(exit_threshold=0.01)
    results = run_bench(llm, PROMPTS, strategies=("adadecode",), batch_sizes=(1,), params=params, policy=policy)
    row = summary(results)[1]
    assert row["strategy"] == "adadecode" and row["verification_to_drafting"] > 0
    assert row["stage_shares"][0] > 0


# ---- workloads, tuned numbers, plots ----


def test_groups_are_of_one_workload_and_each_has_its_own_ratio(llm: LLM) -> None:
    prompts = [*PROMPTS, *PROMPTS]
    workloads = ["a", "a", "a", "b", "b", "b"]
    results = run_bench(llm, prompts, strategies=("layerskip",), batch_sizes=(2,), workloads=workloads,
                        params=SamplingParams(temperature=0, max_tokens=6), policy=Policy())  # fmt: skip
    assert [r.workloads for r in results] == [["a", "a", "b", "b"]] * 2
    plain, drafted = summary(results)
    assert drafted["num_identical"] == 6
    assert {name: one["num_groups"] for name, one in drafted["workloads"].items()} == {"a": 2, "b": 2}
    assert plain["ratio_mean"] == 1 and plain["verification_to_drafting"] is None
    assert drafted["verification_to_drafting"] > 0 and len(drafted["stage_shares"]) == 2
    assert plain["target_calls_per_token"] == pytest.approx(
        sum(max(lengths) for lengths in ([6, 6], [6], [6, 6], [6])) / plain["num_tokens"], abs=0.001
    )
    assert drafted["target_calls_per_token"] < plain["target_calls_per_token"]


def test_tuned_numbers_run_in_the_place_of_a_name(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    used = []
    use = llm.use
    monkeypatch.setattr(llm, "use", lambda *args, **kw: (used.append(args), use(*args, **kw)))
    tuned = {("auto", 1, ""): Setting("layerskip", Policy(num_draft_tokens=3))}
    results = run_bench(llm, PROMPTS[:1], strategies=("auto", "layerskip"), batch_sizes=(1,), tuned=tuned,
                        params=SamplingParams(temperature=0, max_tokens=6), policy=Policy())  # fmt: skip
    assert [r.contender.name for r in results] == [BASELINE, "auto", "layerskip"]
    assert ("layerskip", Policy(num_draft_tokens=3)) in used and ("layerskip", Policy()) in used
    assert summary(results)[1]["num_identical"] == 1


def test_a_plan_gives_auto_its_choice_and_each_strategy_its_best() -> None:
    def figure(strategy: str, gamma: int) -> Figure:
        policy = Policy(num_draft_tokens=gamma)
        return Figure(strategy=strategy, policy=policy, predicted=None, ratio=1.2, ratio_low=1.1)

    entry = PlanEntry(
        batch_size=1, chosen=figure("layerskip", 4), runner_up=None, tuned=[figure("layerskip", 4), figure("hispec", 2)]
    )
    plan = SimpleNamespace(entry_for=lambda size: entry, tuned_for=lambda size: {f.strategy: f for f in entry.tuned})
    names, kinds = ("auto", "hispec", "prompt_lookup"), {"code": ""}
    chosen = Setting("layerskip", entry.chosen.policy)
    assert settings_of(plan, names, (1,), kinds, is_tuned=False) == {("auto", 1, "code"): chosen}
    tuned = settings_of(plan, names, (1,), kinds, is_tuned=True)
    assert tuned["hispec", 1, "code"].policy.num_draft_tokens == 2 and ("prompt_lookup", 1, "code") not in tuned


def test_a_plan_gives_auto_its_choice_for_each_workload() -> None:
    figure = Figure(strategy="layerskip", policy=Policy(), predicted=None, ratio=1.2, ratio_low=1.1)
    other = replace(figure, strategy="hispec")
    entry = PlanEntry(batch_size=1, chosen=figure, runner_up=None, tuned=[figure], by_workload={"code": other})
    plan = SimpleNamespace(entry_for=lambda size: entry)
    found = settings_of(plan, ("auto", "layerskip"), (1, 4), {"code": "code", "news": ""}, is_tuned=False)
    expected = {"code": other.setting, "news": figure.setting}
    assert found == {("auto", size, name): expected[name] for size in (1, 4) for name in expected}


@pytest.mark.parametrize("n", [1, 5, 6, 10, 15, 40])
def test_the_interval_of_the_median_is_the_narrowest_that_binomial_chances_allow(n: int) -> None:
    """By enumeration in fractions: how often the median lies between two order statistics."""
    interval = median_interval(list(range(n)))
    tails = [Fraction(sum(math.comb(n, k) for k in range(skipped + 1)), 2**n) for skipped in range(n // 2)]
    allowed = [skipped for skipped, tail in enumerate(tails) if 2 * tail <= Fraction(5, 100)]
    assert interval == (None if not allowed else (allowed[-1], n - 1 - allowed[-1]))


def test_exact_match_reads_the_last_number() -> None:
    references = ["so 3+4 = <<3+4=7>>7\n#### 1,007", "#### -2.5", None, "no answer in it: 5"]
    assert exact_match(["It is 1007.", "x = -2.50", "5", "5"], references) == 1
    assert exact_match(["1007 of 3", "-2.5", "", ""], references) == 0.5
    assert exact_match(["", "none", "", ""], references) == 0
    assert exact_match(["5"], [None]) is None


def test_command_writes_table_and_plots(artifact: Path, prompts: Path, tmp_path: Path, capsys) -> None:
    data = tmp_path / "data"
    data.mkdir()
    for name in ("one", "two"):
        lines = [{"prompt": f"{name} {i}", "reference": f"#### {i}"} for i in range(2)]
        (data / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    args = ["bench", str(artifact), "--data-dir", str(data), "--max-tokens", "4", "--strategies", "layerskip,hispec"]
    assert main([*args, "--batch-sizes", "1,2", "--plots", str(tmp_path / "plots")]) == 0
    names = {"speed-up-by-benchmark", "speed-up-by-batch-size", "acceptance-by-tier", "time-by-tier"}
    assert {path.name for path in (tmp_path / "plots").iterdir()} == {"bench.md", *(f"{name}.png" for name in names)}
    table = (tmp_path / "plots" / "bench.md").read_text().splitlines()
    assert table[0].startswith("| strategy | batch | one | two | mean |") and len(table) == 2 + 6
    assert all(line.count("|") == table[0].count("|") for line in table)
    assert "ratio to plain decoding by workload" in capsys.readouterr().out


def row(strategy: str, **more: object) -> dict[str, object]:
    """As `summary` gives it, as far as plots look."""
    return {
        "strategy": strategy, "is_lossy": strategy == "sprinter", "batch_size": 1, "temperature": 0.0, "bitwise": True,
        "verification": None if strategy == BASELINE else "identity", "ratio_mean": 1.0, "workloads": {},
        "tokens_per_second": 1.0, "target_calls_per_token": 1.0, "verification_to_drafting": None, "num_identical": 1,
        "num_prompts": 1, "agreement": 1.0, "mean_acceptance_length": {"target": 1.5}, "stage_shares": [0.5, 0.2],
    } | more  # fmt: skip


def test_a_label_tells_what_sets_a_row_apart() -> None:
    rows = [row("hispec"), row("sprinter", temperature=0.7, verification="rejection", bitwise=False)]
    assert [label(one, [one]) for one in rows] == ["hispec", "sprinter (lossy, not bitwise, rejection)"]
    assert [label(one, rows) for one in rows] == [
        "hispec (temperature 0)", "sprinter (lossy, not bitwise, temperature 0.7, rejection)"
    ]  # fmt: skip


def test_temperatures_and_verifications_are_lines_and_names_of_their_own() -> None:
    conditions = [
        {"temperature": t, "verification": v, "batch_size": b}
        for b in (1, 4) for t in (0.3, 1.0) for v in ("identity", "rejection")
    ]  # fmt: skip
    rows = [row("layerskip", **one) for one in conditions]
    names = [f"layerskip (temperature {t}{v})" for t in ("0.3", "1") for v in ("", ", rejection")]
    (axes,) = bench_plots._by_batch_size(rows).axes
    lines = axes.get_lines()
    assert [line.get_label() for line in lines] == names
    assert all(list(line.get_xdata()) == [1, 4] for line in lines)
    assert [line.split(" | ")[0] for line in bench_plots.markdown(rows).splitlines()[2:6]] == [f"| {n}" for n in names]


def test_every_table_and_plot_says_that_a_strategy_is_lossy(capsys) -> None:
    workloads = {name: {"ratio": 1.0, "interval": None} for name in ("one", "two")}
    rows = [row(name, workloads=workloads, batch_size=size) for size in (1, 2) for name in (BASELINE, "sprinter")]
    for draw in (bench_plots._by_workload, bench_plots._by_batch_size):
        texts = [text.get_text() for text in draw(rows).axes[0].get_legend().get_texts()]
        assert "sprinter (lossy)" in texts and "sprinter" not in texts
    for draw in (bench_plots._acceptance, bench_plots._time):
        assert "sprinter (lossy)" in [text.get_text() for text in draw(rows).axes[0].get_xticklabels()]
    print_workloads(rows, Console(width=200))
    assert capsys.readouterr().out.count("sprinter (lossy)") == 2
    print_profile([StrategyOverhead("sprinter", [Overhead(1, 2, 3, 4)])], [Shares("sprinter", 1, 2, 3, {"host": 1})])
    assert capsys.readouterr().out.count("sprinter (lossy)") == 2


@pytest.mark.parametrize("max_tokens", [2, 30])
def test_a_peer_has_room_for_the_longest_prompt_and_its_answer(
    artifact: Path, prompts: Path, tmp_path: Path, capfd, monkeypatch, max_tokens: int
) -> None:
    """A Python that says what it was asked for, in the place of llama-cpp's."""
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "got $*" >&2\n')
    python.chmod(0o755)
    args = ["bench", str(artifact), "--prompts", str(prompts), "--max-tokens", str(max_tokens), "--peers", "llama-cpp"]
    lengths = []
    real = options.token_ids
    monkeypatch.setattr(options, "token_ids", lambda *some: (lengths.append(len(real(*some))), real(*some))[1])
    assert main([*args, "--peer-gguf", "x.gguf", "--peer-python", str(python)]) == 2
    told = capfd.readouterr().err
    assert f"--context {max(lengths) + max(max_tokens, WARMUP_TOKENS)}\n" in told


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--peers", "vllm"], "'vllm' is not one of transformers"),
        (["--peers", "llama-cpp", "--peer-model", "x"], "needs --peer-gguf"),
        (["--peers", "transformers-layerskip"], "needs --peer-model"),
        (["--tuned"], "need a plan that holds here"),
        (["--strategies", "auto"], "need a plan that holds here"),
        (["--plots", "no/such/folder"], "name a folder"),
    ],
)
def test_what_a_race_needs_is_asked_for_before_it(artifact: Path, prompts: Path, capsys, options, reason) -> None:
    assert main(["bench", str(artifact), "--prompts", str(prompts), *options]) == 2
    assert reason in capsys.readouterr().err


@pytest.mark.parametrize("name", ["transformers", "transformers-layerskip", "transformers-prompt-lookup"])
def test_transformers_peers_give_the_models_own_greedy_tokens(tmp_path: Path, name: str) -> None:
    model = make_tiny_model("llama")
    model.save_pretrained(tmp_path)
    peer = Peer(name, str(tmp_path), "float32", "cpu", num_threads=1, early_exit=2)
    try:
        for prompt in PROMPTS:
            token_ids, seconds = peer.generate([prompt], 8)
            ids = list(prompt)
            with torch.no_grad():
                for _ in range(8):
                    ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
            assert seconds > 0 and token_ids == [ids[len(prompt) :]]
    finally:
        peer.close()


def test_a_peer_that_cannot_start_says_so(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="llama-cpp peer ended before its answer"):
        Peer("llama-cpp", str(tmp_path / "none.gguf"), "float32", "cpu", num_threads=1)


def test_the_gguf_of_a_peer_has_the_same_numbers(tmp_path: Path) -> None:
    weights = np.linspace(-1, 1, 2 * 64, dtype=np.float32).reshape(2, 64)
    writer = gguf.GGUFWriter(tmp_path / "q.gguf", "llama")
    writer.add_block_count(3)
    writer.add_token_list(["a", "b"])
    quantised = gguf.quants.quantize(weights, gguf.GGMLQuantizationType.Q4_1)
    writer.add_tensor("w", quantised, raw_dtype=gguf.GGMLQuantizationType.Q4_1)
    writer.add_tensor("norm", np.ones(3, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    write_gguf(tmp_path / "q.gguf", tmp_path / "full.gguf", "float32")
    reader = gguf.GGUFReader(tmp_path / "full.gguf")
    assert reader.get_field("llama.block_count").contents() == 3
    assert reader.get_field("tokenizer.ggml.tokens").contents() == ["a", "b"]
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    expected = gguf.quants.dequantize(quantised, gguf.GGMLQuantizationType.Q4_1)
    assert np.array_equal(tensors["w"].data, expected) and np.array_equal(tensors["norm"].data, np.ones(3))
