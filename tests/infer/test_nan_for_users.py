"""What users see of a row whose target gives NaN: it alone ends, with finish_reason "error" and the cause (A14)."""

import asyncio
import json

import pytest
import torch

from infer import LLM, AsyncLLM, SamplingParams
from infer.cli import main
from infer.failures import NAN_LOGITS
from infer.runner import Runner

NUM_TOKENS = 8
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
GOOD, BAD = [5, 9, 3], [7, 8, 9, 10]


@pytest.fixture
def nan_after_two_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """The target's states, and so its logits, for the third token and later ones of rows that begin as BAD does."""
    advance = Runner.advance

    def spoiled(self, rows, tier):  # type: ignore[no-untyped-def]
        cells = [(row, p) for row in rows for p in range(row.cursors[tier] + 1, len(row) + 1)]
        states = advance(self, rows, tier)
        hit = [r.token_ids[0] == BAD[0] and p >= r.num_prompt_tokens + 2 and tier == 2 for r, p in cells]
        return torch.where(torch.tensor(hit)[:, None], torch.nan, states)

    monkeypatch.setattr(Runner, "advance", spoiled)


@pytest.mark.parametrize("strategy", ["autoregressive", "layerskip", "hispec"])
def test_a_batch_has_the_cause_in_the_bad_rows_output_alone(artifact, strategy, request, caplog):
    llm = LLM(artifact, strategy=strategy)
    before = [out.outputs[0] for out in llm.generate([GOOD, BAD, GOOD], GREEDY)]
    request.getfixturevalue("nan_after_two_tokens")
    outputs = llm.generate([GOOD, BAD, GOOD], GREEDY)
    first, bad, last = (out.outputs[0] for out in outputs)
    assert (first, last) == (before[0], before[2])
    assert (bad.finish_reason, bad.stop_reason) == ("error", NAN_LOGITS)
    assert bad.token_ids == before[1].token_ids[:2]
    assert all(out.finished for out in outputs)
    assert f"request {outputs[1].request_id} failed: {NAN_LOGITS}" in caplog.text


def test_all_choices_of_a_bad_prompt_fail_and_streams_end(artifact, nan_after_two_tokens):
    llm = LLM(artifact, strategy="hispec")
    (output,) = llm.generate([BAD], SamplingParams(seed=1, max_tokens=NUM_TOKENS, n=3, ignore_eos=True))
    assert [o.finish_reason for o in output.outputs] == ["error"] * 3
    *_, streamed = llm.stream(BAD, GREEDY)
    assert (streamed.finished, streamed.outputs[0].finish_reason) == (True, "error")

    async def last() -> object:
        async with AsyncLLM(llm) as engine:
            *_, bad = [output async for output in engine.generate(BAD, GREEDY)]
            *_, good = [output async for output in engine.generate(GOOD, GREEDY)]
            return bad.outputs[0].finish_reason, bad.outputs[0].stop_reason, good.outputs[0].finish_reason

    assert asyncio.run(last()) == ("error", NAN_LOGITS, "length")


def test_generate_names_the_cause_and_ends_with_code_1(artifact, tmp_path, nan_after_two_tokens, capsys):
    prompts, output = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    bad_text = LLM(artifact).tokenizer.decode(BAD[:1])
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("Hello", bad_text)))
    args = ["generate", str(artifact), "--prompts", str(prompts), "--raw", "--output", str(output), "--ignore-eos"]
    assert main([*args, "--max-tokens", "8"]) == 1
    assert [json.loads(line)["finish_reason"] for line in output.read_text().splitlines()] == ["length", "error"]
    assert f"error: 1 texts are incomplete: {NAN_LOGITS}" in capsys.readouterr().err


def test_a_tokenizer_that_stumbles_over_a_broken_rows_tokens_takes_nobody_along(artifact, monkeypatch):
    """The text of `generate` is made at the end, of whatever ends it; neighbours keep theirs, and blocks come back."""
    llm = LLM(artifact, strategy="hispec")
    good = llm.generate([GOOD], GREEDY)[0].outputs[0]
    decode = type(llm.tokenizer).decode

    def picky(self, token_ids, **options):  # type: ignore[no-untyped-def]
        if not set(good.token_ids) >= set(token_ids):
            raise OverflowError("no such id")
        return decode(self, token_ids, **options)

    monkeypatch.setattr(type(llm.tokenizer), "decode", picky)
    outputs = llm.generate([GOOD, BAD, GOOD], GREEDY)
    assert [out.outputs[0] for out in outputs][::2] == [good, good]
    assert outputs[1].outputs[0].finish_reason == "error" and "no such id" in outputs[1].outputs[0].stop_reason
    requests = [llm.make_request(BAD, GREEDY) for _ in range(2)]
    for request in requests:
        request.is_streamed = False
        llm.engine.add(request)
    llm.engine.step()
    for request in requests:
        llm.engine.abort(request.request_id)
    assert not llm.engine.has_unfinished and [r.finish_reason for r in requests] == ["abort"] * 2
    assert llm.engine.pool.num_free == llm.engine.pool.num_blocks - 1


def test_a_failed_request_keeps_the_text_of_its_tokens(artifact, monkeypatch):
    llm = LLM(artifact)
    whole = llm.generate([GOOD], GREEDY)[0].outputs[0]
    advance, calls = Runner.advance, []

    def fails(self, rows, tier):  # type: ignore[no-untyped-def]
        calls.append(tier)
        if len(calls) == 4:
            raise RuntimeError("no more")
        return advance(self, rows, tier)

    monkeypatch.setattr(Runner, "advance", fails)
    (output,) = llm.generate([GOOD], GREEDY)
    assert output.outputs[0].finish_reason == "error" and output.outputs[0].token_ids == whole.token_ids[:3]
    assert output.outputs[0].text == llm.tokenizer.decode(list(whole.token_ids[:3])) != ""
