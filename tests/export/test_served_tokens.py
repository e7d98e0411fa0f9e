"""The gate over the whole runtime: what it lets pass, what it stops, and that a stopped export leaves nothing."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from export import bitwise, parity, served_tokens
from export.cli import Source, load_model
from export.parity import ParityError
from export.served_tokens import NUM_TOKENS, Oracle, ServedTokens, calibration_prompts
from export.writer import ExportOptions, write_artifact
from infer import artifact as artifact_folder
from infer import judging
from infer.artifact import Artifact
from infer.manifest import FileRecord, Manifest
from infer.verify import Verdict, verify
from tests.tiny_engine import DEVICE, hf_greedy
from tests.tiny_models import make_tiny_model
from train.heads import ExitConfig
from train.model import EarlyExitModel


@pytest.fixture(scope="module")
def made(exported: Callable[..., Any]) -> Any:
    return exported("llama", "eager")


@pytest.fixture(scope="module")
def prompts(made: Any) -> list[list[int]]:
    """The first three: the others take as long as all the rest of this file."""
    return all_prompts(made)[:3]


def all_prompts(made: Any) -> list[list[int]]:
    return calibration_prompts(parity.calibration_rows(made.model.family.vocab_size), made.artifact.manifest)


def oracle_of(made: Any) -> Oracle:
    def load() -> Any:
        made.model.family.use_attention("sdpa")
        return made.model.base

    return Oracle(load)


def run(made: Any, prompts: list[list[int]], oracle: Oracle | None = None, **programs: Any) -> Any:
    return served_tokens.check(made.artifact, made.program_set.build, made.programs | programs, prompts, oracle)


def test_prompts_lie_around_the_edges_of_blocks_and_chunks(made: Any) -> None:
    manifest = made.artifact.manifest
    assert [len(p) for p in all_prompts(made)] == [1, 15, 17, 32, 144, 256] and manifest.limits.prefill_chunk == 128
    for longest in (2, 16, 40):
        short = replace(manifest, limits=replace(manifest.limits, max_model_len=longest))
        lengths = [len(p) for p in calibration_prompts([torch.arange(9)], short)]
        assert 1 in lengths and all(1 <= n < longest for n in lengths)


def test_what_was_exported_serves_the_stock_models_greedy_tokens(made: Any) -> None:
    names = ["autoregressive", "layerskip", "hispec", "hispec_paper", "prompt_lookup", "ngram_layerskip", "lookahead",
             "adadecode"]  # fmt: skip
    served = ServedTokens(
        strategies=names, num_prompts=6, num_tokens=6 * NUM_TOKENS, num_equal=dict.fromkeys(names, 6),
        num_equal_to_transformers=6, num_ties=0,
    )  # fmt: skip
    report = json.loads((made.artifact.path / "parity.json").read_text())  # export itself has checked it
    assert report["served"] == {made.program_set.build.folder_name: asdict(served)}


def test_the_oracle_picks_what_the_stock_model_generates(made: Any, prompts: list[list[int]]) -> None:
    oracle, answer = oracle_of(made), hf_greedy(made.model, prompts[1], 8)
    oracle.learn([prompts[1]], [answer])
    assert oracle.logits(prompts[1], answer).argmax(-1).tolist() == answer
    wrong = [*answer[:3], (answer[3] + 1) % 100, *answer[4:]]
    oracle.learn([prompts[1]], [wrong])
    picks = oracle.logits(prompts[1], wrong).argmax(-1).tolist()
    assert picks[:4] == answer[:4] and picks[3] != wrong[3]


def test_a_target_that_picks_another_token_is_stopped(made: Any, prompts: list[list[int]]) -> None:
    unembed = made.programs["unembed"]

    def shifted(states: torch.Tensor) -> torch.Tensor:
        return unembed(states).roll(1, dims=-1)

    with pytest.raises(ParityError, match="plain decoding leaves transformers at token 0 of calibration prompt 0"):
        run(made, prompts, oracle_of(made), unembed=shifted)
    assert run(made, prompts, None, unembed=shifted).num_equal_to_transformers is None


def test_a_tie_of_the_stock_models_logits_is_told_and_passes(
    made: Any, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    oracle = oracle_of(made)
    logits = oracle.logits

    def other_pick(prompt: list[int], answer: list[int]) -> torch.Tensor:
        found = logits(prompt, answer).clone()
        if prompt == prompts[0]:
            found[5, (answer[5] + 1) % 128] = found[5].max() + 1e-3
        return found

    monkeypatch.setattr(oracle, "logits", other_pick)
    monkeypatch.setattr(oracle, "gap", lambda *_: served_tokens.MAX_ERROR / 2)
    served = run(made, prompts, oracle)
    assert (served.num_equal_to_transformers, served.num_ties) == (2, 1)
    monkeypatch.setattr(oracle, "gap", lambda *_: served_tokens.MAX_ERROR * 2)
    with pytest.raises(ParityError, match="at token 5 of calibration prompt 0"):
        run(made, prompts, oracle)


def test_a_strategy_that_keeps_what_was_drafted_is_stopped(
    made: Any, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(judging, "verify", lambda drafted, picks: Verdict(len(drafted), verify(drafted, picks)[1]))
    with pytest.raises(ParityError, match="layerskip leaves plain decoding at token"):
        run(made, prompts, oracle_of(made))


def test_what_one_gate_stops_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from export.writer import ExportOptions, write_artifact
    from tests.export.tiny_exits import ALL_HEADS, make_early_exit

    model = make_early_exit("llama", ALL_HEADS[:1], num_hidden_layers=2)
    seen: list[Manifest] = []

    def stop(artifact: Artifact, *_: Any) -> None:
        seen.append(artifact.manifest)
        assert (artifact.path / "config.json").exists()  # all is there, though not moved yet
        raise ParityError("stopped")

    monkeypatch.setattr(served_tokens, "check", stop)
    with pytest.raises(ParityError, match="stopped"):
        write_artifact(lambda dtype: model, None, ExportOptions(output=tmp_path / "artifact"))
    assert seen and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("dtype", "flips", "stops"), [("float32", 2, True), ("float32", 0, False)])
def test_picks_that_differ_more_than_rounding_allows_are_stopped(
    made: Any, dtype: str, flips: int, stops: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.export.test_parity import caller_of, reference_of

    rows = parity.calibration_rows(made.model.family.vocab_size)
    reference = reference_of(made.model, rows)
    reference = replace(reference, allowed=dict.fromkeys(reference.allowed, 10.0))
    for row in reference.logits["draft"][:flips]:  # other picks, as near as can be
        row.neg_()
    if stops:
        with pytest.raises(ParityError, match=r"tier draft.*of its largest logits are the model's, at least 99\.0%"):
            parity.check(caller_of(made), rows, reference)
    else:
        assert parity.check(caller_of(made), rows, reference, max_batch=5)[0].num_positions == 45 + 45 + 29 + 52 + 5


def test_the_widest_call_is_held_to_parity(made: Any) -> None:
    """A program that goes wrong at so many rows alone."""
    from tests.export.test_parity import caller_of, reference_of

    rows = parity.calibration_rows(made.model.family.vocab_size)
    caller = caller_of(made)
    trunk = made.programs["first.trunk"]

    def narrow(x: torch.Tensor, *rest: Any) -> torch.Tensor:
        return trunk(x, *rest) + (len(x) >= 16)

    broken = replace(caller, programs={**made.programs, "first.trunk": narrow})
    reference = reference_of(made.model, rows)
    parity.check(broken, rows, reference, max_batch=15)
    with pytest.raises(ParityError):
        parity.check(broken, rows, reference, max_batch=16)


@pytest.mark.slow
def test_files_are_hashed_once_for_the_gate_and_once_at_the_end_however_many_sets_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed, record = Counter[str](), artifact_folder._record

    def count(path: Path) -> FileRecord:
        hashed["/".join(path.parts[-2:])] += 1
        return record(path)

    def make(dtype: str) -> EarlyExitModel:
        return load_model(Source(str(tmp_path / "base"), None, [ExitConfig(name="draft", layer=1)], None), dtype)

    make_tiny_model("llama", num_hidden_layers=2).save_pretrained(tmp_path / "base")
    monkeypatch.setattr(artifact_folder, "_record", count)
    monkeypatch.setattr(bitwise, "SHAPES", bitwise.SHAPES[:2])
    write_artifact(make, None, ExportOptions(output=tmp_path / "a", dtypes=("float32", "bfloat16"), device=str(DEVICE)))
    names = list(Manifest.from_json((tmp_path / "a" / "hispec.json").read_text()).files)
    counts = {name: sum(n for end, n in hashed.items() if name.endswith(end)) for name in names if "/" in name}
    assert counts == {name: 2 if name.startswith("programs/") else 1 for name in counts}
    assert len({name.split("/")[1] for name in counts if name.startswith("programs/")}) == 2
