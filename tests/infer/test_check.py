"""`infer check`: what it calls equal, and what it does not."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from infer import LLM, judging, peers
from infer.check import Comparison, Difference, check, target_error
from infer.cli import main
from infer.commands.options import show_progress
from infer.params import SamplingParams
from infer.peers import Margins
from infer.report import print_comparison
from infer.strategy import Policy
from infer.verify import verify
from tests.tiny_artifact import ON_DEVICE, load
from tests.tiny_models import make_tiny_model

PROMPTS = [[5, 9, 3], [7, 8, 9, 10, 11], [20, 21]]
GREEDY = SamplingParams(temperature=0, max_tokens=8)


class Peer:
    """Answers as plain decoding does, but for one token of prompt 1."""

    def __init__(self, texts: list[list[int]], gap: float) -> None:
        self.texts = {tuple(p): list(t) for p, t in zip(PROMPTS, texts, strict=True)}
        self.texts[tuple(PROMPTS[1])][3] += 1
        self.gap, self.asked = gap, []

    def generate(self, prompts, max_tokens):
        return [self.texts[tuple(p)] for p in prompts], 0.1

    def margins(self, prompt, token_ids):
        self.asked.append((list(prompt), list(token_ids)))
        return Margins(top_two=0.001, gap=self.gap, largest=10.0)


@pytest.fixture(scope="module")
def llm(artifact: Path) -> LLM:
    return load(artifact)


def run(llm: LLM, **options):
    names = ("autoregressive", "layerskip", "hispec")
    return check(llm, PROMPTS, GREEDY, strategies=names, batch_sizes=(1, 3), policy=Policy(), **options)


def test_every_strategy_and_batch_size_is_compared_with_plain_decoding(llm: LLM) -> None:
    results = run(llm)
    assert [(r.name, r.batch_size) for r in results] == [
        ("autoregressive", 3), ("layerskip", 1), ("layerskip", 3), ("hispec", 1), ("hispec", 3)
    ]  # fmt: skip
    assert all(r.is_lossless and r.num_prompts == 3 and r.num_tokens > 0 for r in results)


def test_it_tells_what_it_decodes_from_plain_decoding_on(llm: LLM) -> None:
    told: list[str] = []
    check(llm, PROMPTS, GREEDY, strategies=("layerskip",), batch_sizes=(2,), policy=Policy(), on_progress=told.append)
    plain = [f"autoregressive, batch 1: {number} of 3 prompts" for number in range(3)]
    assert told == [*plain, "", "layerskip, batch 2: 0 of 3 prompts", "layerskip, batch 2: 2 of 3 prompts", ""]


def test_a_verifier_that_lets_a_wrong_token_pass_is_found(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def lenient(drafted, picks):
        return len(drafted), verify(drafted, picks)[1]  # keeps all that was drafted

    monkeypatch.setattr(judging, "verify", lenient)
    results = {(r.name, r.batch_size): r for r in run(llm)}
    assert results["autoregressive", 3].is_lossless
    assert not results["layerskip", 1].is_lossless and not results["hispec", 3].is_lossless


@pytest.mark.parametrize(("gap", "is_lossless"), [(0.009, True), (0.011, False)])
def test_a_peers_difference_counts_as_equal_only_within_the_error(llm: LLM, gap: float, is_lossless: bool) -> None:
    texts = [list(o.outputs[0].token_ids) for o in llm.generate(PROMPTS, GREEDY)]
    peer = Peer(texts, gap)
    theirs = run(llm, peer=peer, max_logit_error=1e-3)[-1]
    assert theirs.name == "transformers" and theirs.is_lossless == is_lossless
    assert theirs.differences == [Difference(1, 3, gap, 0.001, 0.01)]
    # Both texts' tokens are asked about: one that is far below the largest is no tie, however near the second is
    assert peer.asked == [([*PROMPTS[1], *texts[1][:3]], [texts[1][3] + 1, texts[1][3]])]


def test_divergence_is_summed_up_with_its_margins(capsys) -> None:
    differences = [
        Difference(0, 7, 0.25, 0.25, 0.3),
        Difference(2, 3, 0.5, 0.125, 0.3),
        Difference(5, 12, 0.125, 0.0, 0.3),
    ]
    result = Comparison("transformers", 1, 12, 240, differences)
    assert result.divergence() == {
        "rate": 0.25, "num_ties": 2, "position": (3, 7, 12), "top_two": (0.0, 0.125, 0.25), "gap": (0.125, 0.25, 0.5)
    }  # fmt: skip
    record = json.loads(json.dumps(result.record()))
    assert record["num_identical"] == 9 and not record["is_lossless"]
    assert [d["is_tie"] for d in record["differences"]] == [True, False, True]
    assert record["differences"][1]["position"] == 3
    print_comparison(result)
    *_, line = capsys.readouterr().out.splitlines()
    assert line.strip() == (
        "25.0% of texts diverge, first at token 3, median 7, last 12; "
        "top-2 gap there 0.0e+00, median 1.2e-01, at most 2.5e-01; 2 of 3 are ties"
    )


def test_nothing_diverges_without_differences(capsys) -> None:
    result = Comparison("hispec", 1, 4, 40)
    assert result.divergence() == {"rate": 0, "num_ties": 0, "position": None, "top_two": None, "gap": None}
    print_comparison(result)
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_a_peer_tells_how_far_tokens_lie_below_its_largest_logit(tmp_path: Path) -> None:
    model = make_tiny_model("llama")
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        logits = model(torch.tensor([[5, 9, 3]])).logits[0, -1]
    order, largest = logits.argsort(descending=True).tolist(), float(logits.abs().max())
    top_two = float(logits[order[0]] - logits[order[1]])
    peer = peers.Peer("transformers", str(tmp_path), "float32", "cpu", num_threads=1)
    try:
        for token_ids, lowest in (([order[0], order[1]], 1), ([order[7], order[0]], 7), ([order[2], order[1]], 2)):
            got = peer.margins([5, 9, 3], token_ids)
            gap = float(logits[order[0]] - logits[order[lowest]])
            assert (got.top_two, got.gap, got.largest) == pytest.approx((top_two, gap, largest), abs=1e-5)
        assert peer.margins([5, 9, 3], []).gap == pytest.approx(top_two, abs=1e-5)
    finally:
        peer.close()


def test_a_difference_without_a_peer_is_never_a_tie() -> None:
    assert not Difference(0, 0).is_tie


def test_command_prints_a_line_each_and_refuses_what_it_cannot_compare(artifact: Path, tmp_path: Path, capsys) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "Hello"}\n{"prompt": "the sea"}\n')
    arguments = ["check", str(artifact), "--prompts", str(prompts), "--max-tokens", "6", "--batch-sizes", "1,2"]
    arguments += ON_DEVICE
    output = tmp_path / "check.json"
    assert main([*arguments, "--temperature", "0.8", "--seed", "3", "--json", str(output)]) == 0
    record = json.loads(output.read_text())
    assert record["prompts"] == ["prompts-1", "prompts-2"] and len(record["results"]) == 5
    assert all(r["num_identical"] == 2 and r["divergence"]["rate"] == 0 for r in record["results"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5 and all("2 of 2 texts identical" in line for line in lines)
    for options, reason in (
        (["--temperature", "0.8"], "only under --seed"),
        (["--temperature", "0.8", "--seed", "1", "--peer-model", "x"], "leave out all but --max-tokens"),
        (["--num-prompts", "0"], "--num-prompts=0"),
        (["--batch-sizes", "1,x"], "whole numbers"),
        (["--batch-sizes", "0"], "at least 1"),
        (["--json", str(tmp_path)], "--json"),
    ):
        assert main([*arguments, *options]) == 2, options
        assert reason in capsys.readouterr().err


def test_a_terminal_is_told_how_far_it_is(monkeypatch, capsys) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    show_progress("3 of 5 prompts")
    assert capsys.readouterr().err.endswith("3 of 5 prompts")


def test_programs_compiled_at_load_have_the_error_of_eagers(llm: LLM) -> None:
    eager = target_error(llm)
    (one,) = [s for s in llm.artifact.programs() if s.build.folder_name == llm.build.folder_name]
    compiled = SimpleNamespace(artifact=llm.artifact, build=one.to_compile().build, manifest=llm.manifest)
    assert compiled.build.backend == "compile" and target_error(compiled) == eager > 0


def test_a_batch_larger_than_what_runs_at_once_is_one_continuous_batch(artifact: Path, tmp_path: Path, capsys) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(f'{{"prompt": "{text}"}}\n' for text in ("Hello", "the sea", "a river", "stones", "I")))
    arguments = [
        "--prompts",
        str(prompts),
        "--max-tokens",
        "6",
        "--batch-sizes",
        "5",
        "--max-num-seqs",
        "2",
    ] + ON_DEVICE
    assert main(["check", str(artifact), *arguments]) == 0
    told = capsys.readouterr()
    assert "batch 5: 5 of 5" in told.out and "of 5 prompts" not in told.err, "progress is for terminals"
    assert main(["bench", str(artifact), *arguments]) == 2
    assert "at most --max-num-seqs=2" in capsys.readouterr().err


def test_texts_that_failed_compare_with_nothing(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every strategy gives the same empty text, which is not what is meant by lossless."""

    def broken(*_: object) -> None:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(llm.engine.runner, "_trunks", [(broken, *rest) for _, *rest in llm.engine.runner._trunks])
    with pytest.raises(ValueError, match="is incomplete: RuntimeError: no such kernel"):
        run(llm)
