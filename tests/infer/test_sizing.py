"""Sizing in closed form, and the command over the tiny artifact with a plan of known figures."""

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

from infer.artifact import Artifact
from infer.cli import main
from infer.plan import Conditions, Figure, Plan, PlanEntry, Sample, write_plan
from infer.pool_size import BYTES_PER_SCORE
from infer.sizing import PROCESS_BYTES, Load, Replica, choose, replicas
from infer.stage import num_scratch_blocks
from infer.strategy import Policy, most_scored, stages_of
from tests.infer.test_pool_size import BLOCK_BYTES, MANIFEST

LOAD = Load(requests_per_second=2, prompt_tokens=300, new_tokens=200, utilization=0.5)  # 400 tokens a second
SPEEDS = {1: 50.0, 4: 150.0, 16: 320.0}
CONDITIONS = Conditions(
    artifact_sha256="0" * 64, backend="eager", device="cpu", dtype="float32", bitwise=True, cuda_graphs=False,
    verification="identity", torch_version="2", versions={}, processor="Some Processor", capability="AVX512",
    num_cpus=8, num_threads=4,
)  # fmt: skip


def plan(*entries: tuple[int, str, Policy, float], conditions: Conditions = CONDITIONS) -> Plan:
    made = []
    for batch_size, strategy, policy, ratio in entries:
        figure = Figure(strategy=strategy, policy=policy, predicted=None, ratio=ratio, ratio_low=1.0)
        made.append(PlanEntry(batch_size=batch_size, chosen=figure, runner_up=None, tuned=[figure]))
    sample = Sample(num_prompts=4, max_tokens=48, temperature=0.0, seed=None, margin=0.03)
    return Plan(conditions=conditions, sample=sample, entries=made)


def sized(given: Plan | None = None, load: Load = LOAD, speeds: dict[int, float] = SPEEDS) -> list[Replica]:
    return replicas(MANIFEST, given, speeds, load, weight_bytes=10**9, itemsize=2)


def test_plain_decoding_in_closed_form() -> None:
    one, four, sixteen = sized()
    assert [r.num_replicas(LOAD) for r in (one, four, sixteen)] == [16, 6, 3]  # ⌈400 / (50, 150, 320 · 0.5)⌉
    assert [r.seconds(LOAD) for r in (one, four, sixteen)] == [4.0, pytest.approx(200 * 4 / 150), 10.0]
    assert four.num_blocks == 1 + 4 * math.ceil(500 / 16)
    scores = 4 * most_scored(Policy(), MANIFEST) * 1000 * BYTES_PER_SCORE
    assert four.memory_bytes == 10**9 + (1 + 4 * 32) * BLOCK_BYTES + scores + PROCESS_BYTES


def test_as_many_run_as_little_says() -> None:
    """At full utilisation, with no rounding of replicas, all places are taken; at half of it half of them."""
    full = Load(requests_per_second=1.6, prompt_tokens=300, new_tokens=200, utilization=1.0)  # 320 tokens/s
    assert sized(load=full)[2].num_replicas(full) == 1 and sized(load=full)[2].num_running(full) == 16
    half = replace(full, requests_per_second=0.8, utilization=0.5)
    assert sized(load=half)[2].num_replicas(half) == 1 and sized(load=half)[2].num_running(half) == 8


def test_a_plan_speeds_up_the_batches_for_which_it_holds() -> None:
    given = plan((1, "prompt_lookup", Policy(num_lookup_tokens=5), 1.5), (8, "autoregressive", Policy(), 1.0))
    one, four, sixteen = sized(given)
    assert [(r.strategy, r.tokens_per_second) for r in (one, four, sixteen)] == [
        ("prompt_lookup", 75.0), ("prompt_lookup", 225.0), ("autoregressive", 320.0)
    ]  # fmt: skip


def test_every_batch_has_room_for_the_guesses_of_any_entry() -> None:
    policy = Policy(lookahead_window=2, lookahead_ngram=3, lookahead_guesses=2)
    scratch = num_scratch_blocks(stages_of("lookahead", policy, MANIFEST), MANIFEST.block_size)
    found = sized(plan((1, "autoregressive", Policy(), 1.0), (8, "lookahead", policy, 1.2)))
    assert scratch > 0 and [r.blocks_per_row for r in found] == [32 + scratch] * 3


def test_fewest_replicas_are_chosen_then_the_smallest_batch() -> None:
    assert choose(sized(), LOAD).batch_size == 16
    small = replace(LOAD, requests_per_second=0.01)
    assert choose(sized(load=small), small).batch_size == 1, "one is enough of each"
    hurried = replace(LOAD, max_seconds=6.0)
    assert choose(sized(), hurried).batch_size == 4, "16 rows take 10 s"
    with pytest.raises(ValueError, match=r"max_seconds=3: a request of 200 new tokens takes 4\.0 s at least"):
        choose(sized(), replace(LOAD, max_seconds=3.0))


@pytest.mark.parametrize(
    ("changes", "speeds", "reason"),
    [
        ({"prompt_tokens": 1900}, SPEEDS, "2100 tokens, the artifact takes 2000"),
        ({}, {65: 9.0}, "batch size 65 must lie between 1 and 64"),
        ({}, {4: 0.0}, "0 tokens per second at batch size 4"),
        ({}, {}, "one batch size at least"),
    ],
)
def test_what_an_artifact_can_not_do_is_refused(changes: dict, speeds: dict[int, float], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        sized(load=replace(LOAD, **changes), speeds=speeds)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({"utilization": 0.0}, "utilization=0"), ({"new_tokens": 0}, "new_tokens=0"), ({"max_seconds": 0.0}, "max_sec")],
)
def test_a_load_that_is_none_is_refused(changes: dict, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        replace(LOAD, **changes)


FLAGS = ["--requests-per-second", "2", "--prompt-tokens", "20", "--new-tokens", "40", "--plain-tokens-per-second"]


def test_the_command_prints_the_arithmetic(artifact: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["size", str(artifact), *FLAGS, "1:10,4:25"]) == 0
    said = capsys.readouterr()
    assert "no plan.json, so plain decoding is sized" in said.err
    found = {name.strip(): formula for name, formula in re.findall(r"^(.{16}) (.+)$", said.out, flags=re.MULTILINE)}
    assert found["replicas"] == "⌈80 / (25.0 × 0.7 utilization)⌉ = 5"
    assert found["serve with"].startswith("--max-num-seqs 4 --num-blocks ")

    opened = Artifact.open(artifact)
    mine = replace(CONDITIONS, artifact_sha256=opened.manifest_sha256)
    write_plan(artifact, plan((1, "layerskip", Policy(), 2.0), conditions=mine))
    assert main(["size", str(artifact), *FLAGS, "1:10,4:25"]) == 0
    said = capsys.readouterr()
    assert "Some Processor, 4 threads" in said.err
    assert "25 plain tokens/s at batch 4 × 2.00 (layerskip) = 50.0 tokens/s" in said.out
    weights = sum(p.weight_bytes for p in opened.select("eager", "float32").build.programs.values())
    assert f"weights {weights / 1e9:.2f} + KV" in said.out

    write_plan(artifact, plan((1, "layerskip", Policy(), 2.0)))
    assert main(["size", str(artifact), *FLAGS, "1:10"]) == 2
    assert "is of another export" in capsys.readouterr().err


@pytest.mark.parametrize("speeds", ["fast", "1:10,1:12", "1:10:12", "1.5:10"])
def test_speeds_that_are_no_pairs_are_refused(artifact: Path, speeds: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["size", str(artifact), *FLAGS, speeds]) == 2
    assert "--plain-tokens-per-second" in capsys.readouterr().err
