"""SPRINTER keeps what its classifier trusts, and nowhere passes for lossless."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from infer.artifact import SPRINTER, Artifact
from infer.bench import run_bench
from infer.bench_summary import summary
from infer.check import check
from infer.cli import main
from infer.llm import LLM
from infer.params import SamplingParams
from infer.sprinter import FEATURES, Classifier, features, keep, read_classifier, write_classifier
from infer.sprinter_fit import logistic_regression
from infer.strategy import LOSSY, STRATEGIES, Policy, rule_of
from tests.tiny_artifact import ON_DEVICE, load
from tests.tiny_engine import PROMPTS, Script, Tiny, model_of, oracle, texts_of

NUM_TOKENS, GAMMA = 20, 4
TEXTS = texts_of("llama", PROMPTS[:3], NUM_TOKENS)


def classifier(least: float, feature: str = "largest_log_probability", sha: str = "") -> Classifier:
    """Trusts a token where the feature reaches `least`."""
    weights = [1000.0 if name == feature else 0.0 for name in FEATURES]
    return Classifier(
        artifact_sha256=sha, feature_names=list(FEATURES), means=[0.0] * 4, scales=[1.0] * 4, weights=weights,
        bias=-1000.0 * least, threshold=0.5, num_samples=0, settings=[],
    )  # fmt: skip


class Rig:
    """Draft exits that are right where `is_right` says so, and sure of it where `is_sure` does."""

    def __init__(self, is_right, is_sure):
        self.is_sure, self.script = is_sure, Script(TEXTS, lambda *where: self.note(where) or is_right(*where))

    def note(self, where):
        self.where = where

    def __call__(self, row, tier, position, logits):
        line = self.script(row, tier, position, logits)
        return line if self.is_sure(*self.where) else line * 0.05


def run(is_right, is_sure, prompts=PROMPTS[:1], **options):
    tiny = Tiny(model_of(), "sprinter", Policy(num_draft_tokens=GAMMA), rig=Rig(is_right, is_sure),
                classifier=classifier(math.log(0.5)), **options)  # fmt: skip
    return tiny, tiny.generate(prompts, SamplingParams(temperature=0, max_tokens=NUM_TOKENS))


@pytest.mark.parametrize(
    ("drafted", "picks", "num_trusted", "verdict"),
    [
        ([1, 2, 3], [9, 9, 9, 7], 3, (3, 7)),  # all trusted: the judge's own token after them
        ([1, 2, 3], [9, 9, 3, 7], 2, (3, 7)),  # the last one verified and right
        ([1, 2, 3], [9, 9, 8, 7], 2, (2, 8)),  # and wrong: the judge's in its place
        ([], [4], 0, (0, 4)),
        ([1, 2], [9, -1, 5], 2, (1, -1)),  # broken logits keep nothing
        ([1, 2], [1, 2, -1], 2, (2, -1)),
    ],
)
def test_trusted_tokens_are_kept_and_the_others_verified(drafted, picks, num_trusted, verdict):
    assert keep(drafted, picks, num_trusted) == verdict


def test_trusted_wrong_tokens_stay_and_the_text_is_another():
    tiny, (request,) = run(lambda *where: False, lambda *where: True)
    assert request.token_ids[:GAMMA] == [(i + 1) % 128 for i in oracle("llama", PROMPTS[0], NUM_TOKENS)[:GAMMA]]
    assert tiny.round.stats[1].num_accepted == tiny.round.stats[1].num_draft_tokens > 0


@pytest.mark.parametrize("is_right", [True, False])
def test_what_the_classifier_never_trusts_is_verified_token_by_token(is_right):
    _, requests = run(lambda *where: is_right, lambda *where: False, prompts=PROMPTS[:3])
    assert [r.token_ids for r in requests] == [oracle("llama", p, NUM_TOKENS) for p in PROMPTS[:3]]
    assert set(request.output().metrics.tiers[0].num_draft_tokens for request in requests) == {10 if is_right else 19}


def test_the_target_is_called_where_the_classifier_doubts_and_after_gamma_tokens():
    _, (request,) = run(lambda *where: True, lambda row, tier, offset, number: number % 2 or offset < 1)
    lengths = request.output().metrics.tiers[0].accepted_lengths
    assert lengths[2] > 0 and lengths[GAMMA] > 0 and sum(lengths) == lengths[2] + lengths[GAMMA] + lengths[1]
    assert request.token_ids == oracle("llama", PROMPTS[0], NUM_TOKENS)


def test_only_the_doubted_token_is_judged():
    """The second token of every round is doubted and wrong, so corrected; the first is right. Exact by luck."""
    _, (request,) = run(lambda row, tier, offset, number: offset < 1, lambda row, tier, offset, number: offset < 1)
    assert request.token_ids == oracle("llama", PROMPTS[0], NUM_TOKENS)


def test_a_row_depends_on_itself_alone():
    each = [SamplingParams(temperature=2.0, seed=b, max_tokens=12) for b in range(4)]
    trusting = classifier(-3.5, "log_probability")
    alone = [Tiny(model_of(), "sprinter", classifier=trusting).generate([p], q)[0].token_ids
             for p, q in zip(PROMPTS[:4], each, strict=True)]  # fmt: skip
    crowded = Tiny(model_of(), "sprinter", classifier=trusting, num_blocks=14)
    assert [r.token_ids for r in crowded.generate(PROMPTS[:4], each)] == alone
    assert crowded.engine.num_preemptions > 0


def test_features_are_those_of_the_law_and_of_the_token():
    logits = torch.tensor([[0.0, 1.0, 3.0], [-torch.inf, 2.0, -torch.inf], [torch.nan] * 3])
    law = logits[0].double().softmax(0)
    values = features(logits, [9, 7, 0], torch.tensor([5, 7, 9]))
    want = [law[2].log(), law[2].log(), law[2].log() - law[1].log(), -(law * law.log()).sum()]
    torch.testing.assert_close(values[0], torch.stack(want))
    assert values[1].tolist() == [0, 0, 1e9, 0] and values[2].isnan().all()
    assert classifier(-9.0).chances(values)[2].isnan()


def test_the_regression_is_the_best_fit_and_separable_classes_have_a_finite_one():
    torch.manual_seed(0)
    values = torch.randn(4000, 2, dtype=torch.float64)
    chances = (values @ torch.tensor([2.0, -1.0], dtype=torch.float64) + 0.5).sigmoid()
    found = logistic_regression(values, (torch.rand(4000, dtype=torch.float64) < chances).double())
    torch.testing.assert_close(found, torch.tensor([2.0, -1.0, 0.5], dtype=torch.float64), rtol=0.05, atol=0.1)
    assert logistic_regression(values, (values[:, 0] > 0).double()).isfinite().all()
    assert logistic_regression(values, torch.ones(4000, dtype=torch.float64)).isfinite().all()


# ---- nobody gets it who has not asked for it ----


def test_it_is_refused_unless_it_is_allowed_and_fitted(artifact: Path) -> None:
    (artifact / SPRINTER).unlink(missing_ok=True)
    with pytest.raises(ValueError, match=r"strategy='sprinter' is lossy.*allow_lossy=True"):
        load(artifact, strategy="sprinter")
    with pytest.raises(ValueError, match=r"sprinter.json; fit one with python -m infer calibrate-sprinter"):
        load(artifact, strategy="sprinter", allow_lossy=True)
    llm = load(artifact, strategy="autoregressive")
    with pytest.raises(ValueError, match="lossy"):
        llm.use("sprinter")
    write_classifier(llm.artifact, classifier(0.0, sha="0" * 64))
    with pytest.raises(ValueError, match="fitted to another artifact"):
        load(artifact, strategy="sprinter", allow_lossy=True)
    assert "sprinter" not in llm.supported(Policy())
    (artifact / SPRINTER).unlink()


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.txt"
    file.write_text("".join(f"Text number {n} of ten\n" for n in range(10)))
    return file


@pytest.mark.slow
def test_it_is_fitted_by_a_command_and_shown_as_lossy(artifact: Path, prompts: Path, tmp_path: Path, capsys) -> None:
    args = [str(artifact), *ON_DEVICE, "--prompts", str(prompts), "--max-tokens", "40"]
    assert main(["calibrate-sprinter", *args, "--least-right", "0.01"]) == 0
    said = capsys.readouterr().out
    assert "drafted tokens" in said and said.count("<- taken") == 1 and "lossy" in said
    fitted = read_classifier(Artifact.open(artifact))
    assert fitted.threshold == 0.05 and fitted.num_samples > 100
    output = tmp_path / "bench.json"
    bench = [
        "bench",
        *args,
        "--num-prompts",
        "2",
        "--strategies",
        "all",
        "--num-draft-tokens",
        "8",
        "--output",
        str(output),
    ]
    assert main([*bench, "--allow-lossy"]) == 0
    assert "sprinter (lossy)" in capsys.readouterr().out
    rows = {row["strategy"]: row for row in json.loads(output.read_text())["rows"]}
    assert set(rows) == set(STRATEGIES)
    assert {name for name, row in rows.items() if row["is_lossy"]} == {"sprinter"}
    assert all(row["agreement"] == 1 for name, row in rows.items() if name != "sprinter")
    assert main(bench) == 0
    assert "sprinter" not in capsys.readouterr().out
    assert main(["check", *args, "--strategies", "sprinter", "--allow-lossy"]) == 2
    assert "lossy by design" in capsys.readouterr().err
    assert main(["check", *args, "--num-prompts", "1", "--strategies", "all", "--allow-lossy"]) == 0
    assert "sprinter" not in capsys.readouterr().out


@pytest.mark.slow
def test_it_is_tuned_by_a_plan_that_may_and_chosen_by_none(artifact: Path, prompts: Path) -> None:
    args = [str(artifact), *ON_DEVICE, "--prompts", str(prompts)]
    assert main(["calibrate-sprinter", *args, "--max-tokens", "40", "--least-right", "0.01"]) == 0
    planned = ["plan", *args, "--num-prompts", "1", "--max-tokens", "12", "--batch-sizes", "1"]
    for allowed, expected in ((["--allow-lossy"], {"sprinter"}), ([], set())):
        assert main([*planned, *allowed]) == 0
        (entry,) = json.loads((artifact / "plan.json").read_text())["entries"]
        assert {one["strategy"] for one in entry["tuned"]} & LOSSY == expected
        assert entry["chosen"]["strategy"] not in LOSSY and entry["runner_up"]["strategy"] not in LOSSY


def test_agreement_is_counted_token_by_token(artifact: Path) -> None:
    llm = load(artifact, strategy="autoregressive", allow_lossy=True)
    write_classifier(llm.artifact, replace(classifier(-1e9), artifact_sha256=read_sha(llm)))
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    plain, lossy = run_bench(llm, [[5, 9, 3], [7, 8, 9]], strategies=("sprinter",), batch_sizes=(2,), params=params,
                             policy=Policy(num_draft_tokens=6))  # fmt: skip
    (_, row) = summary([plain, lossy])
    pairs = zip(plain.token_ids, lossy.token_ids, strict=True)
    want = sum(a == b for one, other in pairs for a, b in zip(one, other, strict=True)) / 24
    assert row["is_lossy"] and row["agreement"] == pytest.approx(want, abs=1e-4) and want < 1


def read_sha(llm: LLM) -> str:
    return llm.conditions.artifact_sha256


def test_it_has_no_law_to_keep_and_no_plan_to_be_in(artifact: Path) -> None:
    tiny = Tiny(model_of(), "sprinter", classifier=classifier(0.0))
    with pytest.raises(ValueError, match="sprinter is lossy"):
        rule_of("rejection", tiny.round.stages, tiny.manifest)
    llm = load(artifact, strategy="autoregressive", allow_lossy=True)
    with pytest.raises(ValueError, match="lossy by design"):
        check(llm, [[5]], SamplingParams(temperature=0, max_tokens=2), strategies=("sprinter",), batch_sizes=(1,),
              policy=Policy())  # fmt: skip


def test_too_few_samples_are_refused_with_the_remedy(artifact: Path, tmp_path: Path, capsys) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("Hello\n" * 5)
    args = [str(artifact), *ON_DEVICE, "--prompts", str(prompts)]
    assert main(["calibrate-sprinter", *args, "--max-tokens", "4"]) == 2
    assert "too few" in capsys.readouterr().err
    assert main(["calibrate-sprinter", *args, "--least-right", "0"]) == 2
    assert "--least-right=0.0 must lie in (0, 1]" in capsys.readouterr().err


@pytest.mark.parametrize(("num_lines", "more"), [(4, ()), (9, ("--num-prompts", "4"))])
def test_too_few_prompts_for_one_to_be_held_out_are_refused_before_any_work(
    tmp_path, monkeypatch, capsys, num_lines, more
):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("Hello\n" * num_lines)
    monkeypatch.setattr("infer.commands.options.load_llm", lambda *_: pytest.fail("the model was loaded"))
    assert main(["calibrate-sprinter", "artifact", "--prompts", str(prompts), *more]) == 2
    assert "4 prompts are too few" in capsys.readouterr().err
