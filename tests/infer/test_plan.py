"""plan.json: what it holds, when it is set aside, and how `LLM` follows it."""

import asyncio
import json
import shutil
import warnings
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from infer.artifact import PLAN, PLAN_TEMPORARY, Artifact
from infer.async_llm import AsyncLLM
from infer.llm import LLM
from infer.params import SamplingParams
from infer.plan import Conditions, Figure, Plan, PlanEntry, Sample, read_plan, write_plan
from infer.strategy import Policy
from tests.tiny_artifact import load

GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
PROMPTS = [[5, 9, 3], [7, 8, 9, 10, 11], [20, 21], [30]]
ENTRIES = ((1, "hispec", Policy(num_draft_tokens=1, window=2)), (3, "layerskip", Policy(num_draft_tokens=3)))


def entry(batch_size: int, strategy: str, policy: Policy) -> PlanEntry:
    chosen = Figure(strategy=strategy, policy=policy, predicted=1.5, ratio=1.4, ratio_low=1.3)
    plain = replace(chosen, strategy="autoregressive", policy=Policy(), predicted=1.0, ratio=1.0, ratio_low=1.0)
    return PlanEntry(
        batch_size=batch_size, chosen=chosen, runner_up=plain if batch_size > 1 else None, tuned=[plain, chosen]
    )


def make_plan(conditions: Conditions, *entries: tuple[int, str, Policy]) -> Plan:
    sample = Sample(num_prompts=4, max_tokens=48, temperature=0.0, seed=None, margin=0.03)
    return Plan(conditions=conditions, sample=sample, entries=[entry(*one) for one in entries or ENTRIES])


@pytest.fixture(scope="module")
def loaded(artifact: Path) -> LLM:
    return quiet(artifact, num_draft_tokens=5)  # a plan brings its own


@pytest.fixture
def llm(loaded: LLM) -> LLM:
    """As if it had been loaded with a plan; loading takes seconds."""
    loaded.use("autoregressive")
    loaded._chooser.plan = make_plan(loaded.conditions)
    return loaded


@pytest.fixture
def planned(artifact: Path, loaded: LLM, tmp_path: Path) -> Artifact:
    """The artifact with a plan that holds here."""
    folder = tmp_path / "artifact"
    shutil.copytree(artifact, folder)
    write_plan(folder, make_plan(loaded.conditions))
    return Artifact.open(folder)


def quiet(folder: Path, **options: Any) -> LLM:
    """Loaded without any warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return load(folder, **options)


def used(llm: LLM) -> tuple[str, Policy]:
    return llm.strategy, llm.policy


def test_what_was_written_is_what_is_read(planned: Artifact, loaded: LLM) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert read_plan(planned, loaded.conditions) == make_plan(loaded.conditions)
    assert not (planned.path / PLAN_TEMPORARY).exists()
    (planned.path / PLAN_TEMPORARY).write_text("{")  # of a planner that was killed
    Artifact.open(planned.path)


def test_a_model_is_loaded_with_the_plan_that_lies_in_its_folder(planned: Artifact) -> None:
    llm = quiet(planned.path)
    assert llm.plan == make_plan(llm.conditions)
    assert used(llm) == ENTRIES[1][1:]  # the most rows that may come
    llm.generate(PROMPTS[0], GREEDY)
    assert used(llm) == ENTRIES[0][1:]


def test_a_strategy_that_was_asked_for_needs_no_plan(planned: Artifact) -> None:
    assert quiet(planned.path, strategy="layerskip", bitwise=False).plan is None  # nor is one that misfits reported


def test_the_entry_is_that_of_the_largest_batch_size_not_above() -> None:
    conditions = Conditions(**{one.name: "x" for one in fields(Conditions)})  # type: ignore[arg-type]
    plan = make_plan(conditions, *((size, "autoregressive", Policy()) for size in (2, 4, 16)))
    assert [plan.entry_for(rows).batch_size for rows in (1, 2, 3, 4, 15, 16, 99)] == [2, 2, 2, 4, 4, 16, 16]
    for sizes in ((), (4, 2), (2, 2), (0, 1)):
        with pytest.raises(ValueError, match=r"plan\.json: batch sizes .* must ascend"):
            replace(plan, entries=[entry(size, "autoregressive", Policy()) for size in sizes])


def test_a_strategy_that_was_not_tried_at_a_size_has_its_numbers_from_fewer_rows() -> None:
    conditions = Conditions(**{one.name: "x" for one in fields(Conditions)})  # type: ignore[arg-type]
    plan = make_plan(conditions, *ENTRIES, (8, "layerskip", Policy(num_draft_tokens=1)))
    for rows, numbers in ((1, (1, 5)), (3, (1, 3)), (7, (1, 3)), (8, (1, 1))):
        tuned = plan.tuned_for(rows)
        assert tuned["hispec"].policy.num_draft_tokens == numbers[0]
        assert ("layerskip" in tuned) == (rows >= 3)
        assert rows < 3 or tuned["layerskip"].policy.num_draft_tokens == numbers[1]


def test_a_plan_chooses_by_the_workload_that_is_named(artifact: Path, planned: Artifact, loaded: LLM) -> None:
    made = make_plan(loaded.conditions)
    code = replace(made.entries[0].chosen, strategy="layerskip", policy=Policy(num_draft_tokens=6))
    entries = [replace(one, by_workload={"code": code, "news": one.chosen}) for one in made.entries]
    write_plan(planned.path, replace(made, entries=entries))
    llm = quiet(planned.path, workload="code")
    assert llm.plan is not None and llm.plan.workloads == ["code", "news"] and code.setting in llm.plan.settings
    assert used(llm) == ("layerskip", Policy(num_draft_tokens=6))
    assert used(quiet(planned.path)) == ENTRIES[1][1:]
    with pytest.raises(
        ValueError, match=r"workload='poems' is not in plan\.json, which knows code, news: leave it out"
    ):
        quiet(planned.path, workload="poems")
    with pytest.raises(ValueError, match=r"workload='code' chooses within a plan, which strategy='hispec' does not"):
        quiet(planned.path, strategy="hispec", workload="code")
    assert quiet(artifact, workload="code").strategy == "autoregressive"  # as without it, where there is no plan


def test_a_workload_of_a_plan_for_all_texts_is_refused_with_the_remedy(planned: Artifact) -> None:
    with pytest.raises(ValueError, match=r"which knows none, as it was made without --by-workload"):
        quiet(planned.path, workload="code")


def test_auto_follows_the_plan_by_the_number_of_texts_with_plain_decodings_tokens(llm: LLM) -> None:
    plan, llm._chooser.plan = llm.plan, None
    texts = [out.outputs[0].token_ids for out in llm.generate(PROMPTS, GREEDY)]
    assert llm.strategy == "autoregressive"
    llm._chooser.plan = plan
    for count, expected in ((1, ENTRIES[0]), (2, ENTRIES[0]), (3, ENTRIES[1]), (4, ENTRIES[1]), (1, ENTRIES[0])):
        outputs = llm.generate(PROMPTS[:count], GREEDY)
        assert used(llm) == expected[1:]
        assert [out.outputs[0].token_ids for out in outputs] == texts[:count]
        judges = [tier.tier for tier in outputs[0].metrics.tiers]
        assert judges == (["intermediate", "target"] if llm.strategy == "hispec" else ["target"])
    llm.generate(PROMPTS[0], replace(GREEDY, n=3))
    assert llm.strategy == "layerskip"
    *_, last = llm.stream(PROMPTS[0], GREEDY)
    assert llm.strategy == "hispec" and last.outputs[0].token_ids == texts[0]


def test_no_more_rows_are_counted_than_run_at_once(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm, "max_num_seqs", 2)
    llm.generate(PROMPTS, GREEDY)
    assert llm.strategy == "hispec"


def test_requests_that_run_keep_their_strategy_and_those_beside_them_join(llm: LLM) -> None:
    stream = llm.stream(PROMPTS[0], GREEDY)
    next(stream)
    outputs = llm.generate(PROMPTS, GREEDY)
    assert llm.strategy == "hispec"
    *_, last = stream
    assert last.outputs[0].token_ids == outputs[0].outputs[0].token_ids


def test_a_chosen_strategy_ends_following(llm: LLM) -> None:
    llm.use("autoregressive")
    llm.generate(PROMPTS[0], GREEDY)
    assert llm.strategy == "autoregressive" and llm.plan is None


def test_the_async_engine_takes_the_entry_of_its_most_rows(llm: LLM) -> None:
    async def main() -> None:
        async with AsyncLLM(llm) as engine:
            async for output in engine.generate(PROMPTS[0], GREEDY):
                last = output
            assert len(last.outputs[0].token_ids) == 10 and llm.strategy == "layerskip"

    llm.generate(PROMPTS[0], GREEDY)
    assert llm.strategy == "hispec"
    asyncio.run(main())


# ---- set aside ----


def ignored(planned: Artifact, here: Conditions, *words: str) -> None:
    with pytest.warns(UserWarning) as caught:
        assert read_plan(planned, here) is None
    (message,) = [str(one.message) for one in caught]
    for word in (
        *words,
        f"{planned.path / PLAN} is ignored, decoding plainly: ",
        "; make one with python -m infer plan",
    ):
        assert word in message
    assert message.count("make one with") == 1


@pytest.mark.parametrize("field", [one.name for one in fields(Conditions)])
def test_a_plan_for_other_conditions_is_set_aside_naming_them(planned: Artifact, loaded: LLM, field: str) -> None:
    before = getattr(loaded.conditions, field)
    others = {
        bool: lambda: not before,
        int: lambda: before + 1,
        str: lambda: f"{before}-other",
        dict: lambda: {"onnxruntime": "0.1"},
    }
    here = replace(loaded.conditions, **{field: others[type(before)]()})
    ignored(planned, here, f"{field} was {before!r} for it and is {getattr(here, field)!r} here")


def test_a_model_whose_options_are_other_conditions_decodes_plainly(planned: Artifact) -> None:
    with pytest.warns(UserWarning, match="bitwise was True for it and is False here"):
        llm = load(planned.path, bitwise=False)
    llm.generate(PROMPTS[0], GREEDY)
    assert llm.plan is None and llm.strategy == "autoregressive"


def test_every_condition_is_that_of_the_model(artifact: Path, loaded: LLM) -> None:
    here = Conditions.here(loaded.artifact, loaded.build, bitwise=False, cuda_graphs=True, verification="rejection")
    assert (here.bitwise, here.cuda_graphs, here.verification) == (False, True, "rejection")
    assert (here.backend, here.dtype) == ("eager", "float32") and len(here.artifact_sha256) == 64
    assert here.num_threads == torch.get_num_threads()


def test_a_plan_of_another_version_of_a_package_is_set_aside(
    planned: Artifact, loaded: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = replace(loaded.build, backend="onnx", versions={"onnxruntime": "1.23.0"})

    def here(version: str) -> Conditions:
        monkeypatch.setattr("infer.plan.package_version", {"onnxruntime": version}.get)
        return Conditions.here(planned, build, bitwise=True, cuda_graphs=False, verification="identity")

    write_plan(planned.path, plan := make_plan(here("1.30.0")))
    assert read_plan(planned, here("1.30.0")) == plan
    ignored(planned, here("1.31.0"), "versions was {'onnxruntime': '1.30.0'} for it and is {'onnxruntime': '1.31.0'}")


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda data: data.update(format_version=99), "format_version=99, this HiSpec reads 5"),
        (lambda data: data.pop("sample"), "field 'sample' is missing"),
        (lambda data: data["entries"][0]["chosen"]["policy"].pop("window"), "field 'window' is missing"),
        (lambda data: data["entries"][0].update(batch_size="1"), "entries[0]: batch_size: got '1', expected int"),
        (lambda data: data["entries"][0]["chosen"].update(strategy="magic"), "entry of batch size 1: strategy='magic'"),
        (lambda data: data["entries"][1]["chosen"]["policy"].update(num_draft_tokens=0), "num_draft_tokens=0"),
        (lambda data: data["entries"][1]["chosen"]["policy"].update(num_draft_tokens=999), "entry of batch size 3"),
        (lambda data: data["entries"].clear(), "batch sizes []"),
    ],
)
def test_a_malformed_plan_is_set_aside_naming_the_fault(
    planned: Artifact, loaded: LLM, change: Callable[[Any], Any], word: str
) -> None:
    data = json.loads((planned.path / PLAN).read_text())
    change(data)
    (planned.path / PLAN).write_text(json.dumps(data))
    ignored(planned, loaded.conditions, word)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff"])
def test_a_plan_that_is_none_is_set_aside(planned: Artifact, loaded: LLM, content: bytes) -> None:
    (planned.path / PLAN).write_bytes(content)
    ignored(planned, loaded.conditions)


def test_without_a_plan_auto_decodes_plainly(artifact: Path, loaded: LLM) -> None:
    assert read_plan(Artifact.open(artifact), loaded.conditions) is None
    loaded._chooser.plan = None
    loaded.use("autoregressive")
    loaded.follow_plan(1)
    assert loaded.strategy == "autoregressive"
