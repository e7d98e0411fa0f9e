"""`LLM` and the command line over a tiny artifact: what users touch, good and bad input."""

import itertools
import json
import shutil
from pathlib import Path

import pytest
import torch

from infer import LLM, SamplingParams
from infer.cli import main
from infer.cuda_graphs import without_graphs
from infer.prompts import read_prompts
from tests.tiny_artifact import MAX_MODEL_LEN, ON_DEVICE, VOCAB_SIZE, load
from tests.tiny_engine import DEVICE

GREEDY = SamplingParams(temperature=0, max_tokens=12)
ON_CPU = DEVICE.type == "cpu"


@pytest.fixture(scope="module")
def llm(artifact: Path) -> LLM:
    return load(artifact, strategy="hispec", seed=0)


def test_generate_takes_text_ids_mappings_and_lists_of_them(llm: LLM) -> None:
    ids = list(llm.tokenizer("Hello, world!")["input_ids"])
    by_text, by_ids = llm.generate("Hello, world!", GREEDY), llm.generate(ids, GREEDY)
    many = llm.generate(["Hello, world!", ids, {"prompt_token_ids": ids}], GREEDY)
    assert {out.outputs[0].token_ids for out in [*by_text, *by_ids, *many]} == {by_text[0].outputs[0].token_ids}
    assert by_text[0].prompt == "Hello, world!"
    assert by_ids[0].prompt is None
    assert by_ids[0].prompt_token_ids == tuple(ids)


def test_strategies_give_the_same_tokens_from_one_artifact(artifact: Path, llm: LLM) -> None:
    prompts = ["Hello", "the river and the sea", "A"]
    params = SamplingParams(temperature=0.9, top_p=0.9, seed=3, max_tokens=20)
    outputs = {}
    for strategy in ("autoregressive", "layerskip", "hispec"):
        other = load(artifact, strategy=strategy, num_draft_tokens=3)
        outputs[strategy] = [out.outputs[0].token_ids for out in other.generate(prompts, params)]
    assert outputs["autoregressive"] == outputs["layerskip"] == outputs["hispec"]


def test_stream_grows_to_what_generate_gives(llm: LLM) -> None:
    pieces = list(llm.stream("Hello, world!", GREEDY))
    final = llm.generate("Hello, world!", GREEDY)[0]
    assert [p.finished for p in pieces] == [False] * (len(pieces) - 1) + [True]
    assert pieces[-1].outputs == final.outputs
    for before, after in itertools.pairwise(pieces):
        assert after.outputs[0].text.startswith(before.outputs[0].text)


def test_closing_a_stream_gives_all_blocks_back(llm: LLM) -> None:
    stream = llm.stream("Hello", SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
    next(stream)
    assert llm.engine.pool.num_free < llm.engine.pool.num_blocks - 1
    stream.close()
    assert llm.engine.pool.num_free == llm.engine.pool.num_blocks - 1
    assert not llm.engine.has_unfinished


def test_chat_renders_the_template_once(llm: LLM) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    ids = llm.chat_prompt(messages)
    assert llm.tokenizer.decode(ids) == "<|user|>Hello<eos><|assistant|>"
    assert llm.chat(messages, GREEDY)[0].outputs == llm.generate(ids, GREEDY)[0].outputs


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        ("", "empty"),
        ([[]], "empty"),
        ([[VOCAB_SIZE]], "no token id"),
        ([[-1]], "no token id"),
        ([[1.5]], "no token id"),
        ({"text": "x"}, "prompt_token_ids"),
    ],
)
def test_a_bad_prompt_is_refused_and_the_next_one_served(llm: LLM, prompt: object, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        llm.generate(prompt, GREEDY)
    assert llm.generate("Hello", GREEDY)[0].finished


@pytest.mark.parametrize(
    "fields",
    [
        {"logit_bias": {VOCAB_SIZE: 1.0}},
        {"allowed_token_ids": [1, VOCAB_SIZE]},
        {"stop_token_ids": [VOCAB_SIZE]},
        {"logprobs": VOCAB_SIZE + 1},
        {"prompt_logprobs": VOCAB_SIZE + 1},
    ],
    ids=str,
)
def test_ids_that_the_model_does_not_have_are_refused_before_any_work(llm: LLM, fields: dict) -> None:
    good, bad = GREEDY, SamplingParams(max_tokens=4, **fields)
    with pytest.raises(ValueError, match=next(iter(fields))):
        llm.generate(["Hello", "world"], [good, bad])
    assert not llm.engine.has_unfinished
    assert llm.generate("Hello", GREEDY)[0].finished


def test_bad_words_never_appear_and_the_text_is_plain_decodings(artifact: Path, llm: LLM) -> None:
    words = [" river", "the", "Hello"]
    params = SamplingParams(temperature=1.0, seed=2, max_tokens=30, bad_words=words, ignore_eos=True)
    (output,) = llm.generate("Hello, world!", params)
    bad = {llm.tokenizer(w, add_special_tokens=False)["input_ids"][-1] for w in words}
    assert not bad & set(output.outputs[0].token_ids)
    (plain,) = load(artifact, strategy="autoregressive").generate("Hello, world!", params)
    assert plain.outputs[0].token_ids == output.outputs[0].token_ids


def test_logprobs_carry_the_tokens_texts(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=6, logprobs=2, prompt_logprobs=1)
    (output,) = llm.generate("Hello, world!", params)
    done = output.outputs[0]
    for token_id, entry in zip(done.token_ids, done.logprobs, strict=True):
        assert entry[token_id].rank == 1
        assert all(one.decoded_token == llm.tokenizer.decode([i]) for i, one in entry.items())
    assert output.prompt_logprobs[0] is None
    assert [i in e for i, e in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)]


def test_without_detokenize_tokens_come_without_text(llm: LLM) -> None:
    (output,) = llm.generate("Hello", SamplingParams(temperature=0, max_tokens=12, detokenize=False, logprobs=0))
    assert output.outputs[0].text == ""
    assert output.outputs[0].token_ids == llm.generate("Hello", GREEDY)[0].outputs[0].token_ids
    assert {one.decoded_token for entry in output.outputs[0].logprobs for one in entry.values()} == {None}


def test_no_prompts_is_no_work(llm: LLM) -> None:
    assert llm.generate([], GREEDY) == []


def test_empty_messages_are_refused(llm: LLM) -> None:
    with pytest.raises(ValueError, match="messages is empty"):
        llm.chat([])


@pytest.mark.parametrize("max_tokens", [None, 1, 50])
def test_a_prompt_one_short_of_the_limit_gets_exactly_one_token(llm: LLM, max_tokens: int | None) -> None:
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    (output,) = llm.generate([[5] * (MAX_MODEL_LEN - 1)], params)
    assert len(output.outputs[0].token_ids) == 1
    assert output.outputs[0].finish_reason == "length"
    for too_long in (MAX_MODEL_LEN, MAX_MODEL_LEN + 1):
        with pytest.raises(ValueError, match=rf"{too_long} tokens.*max_model_len is {MAX_MODEL_LEN}"):
            llm.generate([[5] * too_long], params)


def test_a_request_beyond_the_pool_is_refused_before_any_runs(artifact: Path) -> None:
    small = load(artifact, num_blocks=9)  # 8 blocks of 4 positions
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    with pytest.raises(ValueError, match="num_blocks"):
        small.generate([[5] * 20, [5] * 40, [5] * 20], params)
    outputs = small.generate([[5] * 20, [5] * 20], params)  # together they exceed the pool: the second waits
    assert [len(out.outputs[0].token_ids) for out in outputs] == [4, 4]


def test_batches_larger_than_max_num_seqs_queue_in_order(artifact: Path, llm: LLM) -> None:
    narrow = load(artifact, strategy="hispec", max_num_seqs=2)
    prompts = [[i + 3] * (i + 1) for i in range(5)]
    got = [out.outputs[0].token_ids for out in narrow.generate(prompts, GREEDY)]
    assert got == [llm.generate([p], GREEDY)[0].outputs[0].token_ids for p in prompts]


def test_streams_that_share_the_engine_both_show_their_end(artifact: Path) -> None:
    llm, params = load(artifact), SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    alone = [llm.generate(prompt, params)[0].outputs[0].token_ids for prompt in ("Hello", "the sea")]
    first, second = llm.stream("Hello", params), llm.stream("the sea", params)
    next(first)
    ends = [list(second)[-1], list(first)[-1]]
    assert all(output.finished for output in ends)
    assert [output.outputs[0].token_ids for output in reversed(ends)] == alone


@pytest.mark.parametrize(
    ("kwargs", "reason"),
    [
        ({"strategy": "lookahed"}, "is not one of autoregressive"),
        ({"num_draft_tokens": 0}, "num_draft_tokens=0"),
        ({"strategy": "hispec", "window": 500}, "choose lower numbers"),
        ({"backend": "tensorrt"}, "tensorrt"),
        ({"dtype": "float64"}, "float64"),
        ({"max_num_seqs": 0}, "max_num_seqs=0"),
        ({"max_num_prefill_tokens": 0}, "max_num_prefill_tokens=0"),
        ({"device": "tpu"}, "device='tpu'"),
        ({"device": "cuda:1"}, "CUDA_VISIBLE_DEVICES"),
        ({"gpu_memory_utilization": 0}, "gpu_memory_utilization=0"),
        ({"num_blocks": 1}, "num_blocks=1"),
        *([({"device": "cuda"}, "no programs" if torch.cuda.is_available() else "finds no GPU")] if ON_CPU else []),
    ],
)
def test_a_bad_option_is_refused_by_name(artifact: Path, kwargs: dict, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        load(artifact, **kwargs)


@pytest.mark.skipif(not ON_CPU, reason="on a GPU: tests/infer/test_gpu.py")
@pytest.mark.parametrize("enforce_eager", [False, True])
def test_on_cpu_there_are_no_graphs_whether_they_are_allowed_or_not(artifact: Path, enforce_eager: bool) -> None:
    runner = load(artifact, enforce_eager=enforce_eager).engine.runner
    programs = [program for program, *_ in (*runner._trunks, *runner._exits, *runner._unembeds)]
    assert all(without_graphs(program) is program for program in programs)


# ---- command line ----


def test_generate_writes_one_line_per_prompt_and_checks_them(artifact: Path, tmp_path: Path, capsys) -> None:
    prompts, output = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    prompts.write_text('{"id": "a", "prompt": "Hello"}\n\n{"turns": ["the sea", "and then?"]}\n')
    args = ["generate", str(artifact), "--prompts", str(prompts), "--output", str(output), "--strategy", "hispec"]
    assert main([*args, "--max-tokens", "8", "--check", *ON_DEVICE]) == 0
    records = [json.loads(line) for line in output.read_text().splitlines()]
    assert [r["id"] for r in records] == ["a", "prompts-3"]
    assert all(r["num_tokens"] <= 8 for r in records)
    assert "check: 2 of 2 equal" in capsys.readouterr().err


def test_generate_streams_a_single_prompt(artifact: Path, llm: LLM, capsys) -> None:
    assert main(["generate", str(artifact), "--prompt", "Hello", "--raw", "--max-tokens", "12", *ON_DEVICE]) == 0
    assert capsys.readouterr().out == llm.generate("Hello", GREEDY)[0].outputs[0].text + "\n"


def test_generate_writes_every_text_of_n(artifact: Path, llm: LLM, capsys) -> None:
    args = ["generate", str(artifact), "--prompt", "Hello", "--raw", "--n", "2", "--max-tokens", "6", "--check"]
    assert main([*args, "--temperature", "1", "--seed", "5", "--strategy", "layerskip"]) == 0
    captured = capsys.readouterr()
    records = [json.loads(line) for line in captured.out.splitlines()]
    (output,) = llm.generate("Hello", SamplingParams(temperature=1, seed=5, n=2, max_tokens=6))
    assert [(r["index"], r["text"]) for r in records] == [(done.index, done.text) for done in output.outputs]
    assert "check: 2 of 2 equal" in captured.err


def test_bench_prints_a_table_and_writes_json(artifact: Path, tmp_path: Path, capsys) -> None:
    prompts, output = tmp_path / "prompts.txt", tmp_path / "bench.json"
    prompts.write_text("Hello\nthe river\nA\n")
    args = ["bench", str(artifact), "--prompts", str(prompts), "--batch-sizes", "1,2", "--max-tokens", "8"]
    assert main([*args, "--output", str(output), *ON_DEVICE]) == 0
    rows = json.loads(output.read_text())["rows"]
    assert [(r["strategy"], r["batch_size"]) for r in rows] == [
        (s, b) for b in (1, 2) for s in ("autoregressive", "layerskip", "hispec")
    ]
    assert all(r["num_identical"] == r["num_prompts"] == 3 for r in rows)
    assert "ratio to plain" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--prompt", ""], "empty"),
        ([], "nothing to complete"),
        (["--prompts", "missing.jsonl"], "no such file"),
        (["--prompt", "x", "--temperature", "-1"], "temperature"),
        (["--prompt", "x", "--repetition-penalty", "0"], "repetition_penalty"),
        (["--prompt", "x", "--min-p", "2"], "min_p"),
        (["--prompt", "x", "--min-tokens", "-1"], "min_tokens"),
        (["--prompt", "x", "--presence-penalty", "3"], "presence_penalty"),
        (["--prompt", "x", "--frequency-penalty", "3"], "frequency_penalty"),
        (["--prompt", "x", "--bad-word", " "], "bad_words"),
        (["--prompt", "x", "--strategy", "magic"], "magic"),
    ],
)
def test_bad_arguments_end_with_code_2_and_one_line(artifact: Path, capsys, arguments: list[str], reason: str) -> None:
    assert main(["generate", str(artifact), "--raw", *arguments, *ON_DEVICE]) == 2
    message = capsys.readouterr().err.splitlines()[-1]
    assert message.startswith("error: ")
    assert reason in message


def test_a_malformed_prompt_row_is_named_with_its_number(artifact: Path, tmp_path: Path, capsys) -> None:
    for row, reason in [
        ("{", "not JSON"),
        ('{"text": 1}', "expected 'prompt'"),
        ('{"prompt": " "}', "empty"),
        ("3", "int"),
    ]:
        path = tmp_path / "rows.jsonl"
        path.write_text('{"prompt": "fine"}\n' + row + "\n")
        assert main(["generate", str(artifact), "--prompts", str(path), *ON_DEVICE]) == 2
        message = capsys.readouterr().err
        assert f"{path}:2" in message
        assert reason in message


def test_a_line_separator_inside_a_prompt_does_not_end_its_row(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    text = "one\u2028two\x85three"
    path.write_text(json.dumps({"prompt": text}, ensure_ascii=False) + "\r\n", encoding="utf-8", newline="")
    assert [row.text for row in read_prompts(path)] == [text]


def test_a_damaged_artifact_is_refused_with_code_2(artifact: Path, tmp_path: Path, capsys) -> None:
    for damage in ("missing", "changed"):
        copy = tmp_path / damage
        shutil.copytree(artifact, copy)
        (victim,) = copy.glob("programs/*/target.trunk.*")
        victim.unlink() if damage == "missing" else victim.write_bytes(victim.read_bytes()[:-1] + b" ")
        assert main(["generate", str(copy), "--prompt", "x", *ON_DEVICE]) == 2
        assert "target.trunk" in capsys.readouterr().err
