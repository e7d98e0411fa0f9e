"""Streams say the same as whole answers, in OpenAI's order, at any pace."""

import asyncio
import itertools

import pytest

from infer.params import SamplingParams
from infer.server import streaming
from tests.infer.server.harness import CHAT, TEXT, ask, official, on_port, served, sse

USAGE = {"stream": True, "stream_options": {"include_usage": True}}


@pytest.fixture(scope="module")
def one(llm):
    with served(llm) as one:
        yield one


def joined(chunks):
    """index → (text, finish reasons) of a chat's or a completion's stream."""
    found = {}
    for choice in itertools.chain.from_iterable(chunk["choices"] for chunk in chunks):
        text, reasons = found.get(choice["index"], ("", []))
        piece = choice["text"] if "text" in choice else choice["delta"].get("content", "")
        reasons = reasons + ([choice["finish_reason"]] if choice["finish_reason"] else [])
        found[choice["index"]] = text + piece, reasons
    return found


def whole(answer):
    texts = [c["text"] if "text" in c else c["message"]["content"] for c in answer["choices"]]
    return {i: (text, [c["finish_reason"]]) for i, (text, c) in enumerate(zip(texts, answer["choices"], strict=True))}


@pytest.mark.parametrize(("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)])
def test_usage_comes_once_in_the_end_if_asked_for(one, path, body):
    """D01"""
    answer = ask(one, path, body).json()
    chunks = sse(ask(one, path, body | USAGE))
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert (chunks[-1]["choices"], chunks[-1]["usage"]) == ([], answer["usage"])
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    for options in ({}, {"stream_options": {"include_usage": False}}):
        chunks = sse(ask(one, path, body | {"stream": True} | options))
        assert not any("usage" in chunk for chunk in chunks) and all(chunk["choices"] for chunk in chunks)
        assert joined(chunks) == whole(answer)


def test_n_texts_of_several_prompts_have_indices_of_their_own_and_one_end_each(one):
    """D06"""
    body = {"prompt": [TEXT["prompt"], "by the river"], "n": 3, "temperature": 0.9, "seed": 5, "max_tokens": 7}
    want = whole(ask(one, "/v1/completions", body).json())
    chunks = sse(ask(one, "/v1/completions", body | USAGE))
    got = joined(chunks)
    assert got == want and sorted(got) == list(range(6))
    assert len({text for text, _ in got.values()}) > 2
    assert chunks[-1]["usage"] == ask(one, "/v1/completions", body).json()["usage"]


def test_a_chat_opens_with_its_role_and_speaks_to_the_official_client(one):
    with on_port(one) as address:
        stream = official(address).chat.completions.create(**CHAT | USAGE)
        chunks = list(stream)
    assert (chunks[0].choices[0].delta.role, chunks[0].choices[0].delta.content) == ("assistant", "")
    assert all(chunk.choices[0].delta.role is None for chunk in chunks[1:-1])
    assert [c.choices[0].finish_reason for c in chunks[:-1]] == [None] * (len(chunks) - 2) + ["length"]
    assert chunks[-1].usage.completion_tokens == CHAT["max_tokens"]
    assert len(chunks) > 5, "tokens must come as they are made"


@pytest.mark.parametrize("at", range(2, 9, 2))
def test_nothing_of_a_stop_string_leaks(one, at, reference):
    """D12: the stop string is cut out of what plain decoding says, so it ends anywhere in a token or a block."""
    (output,) = reference.generate(TEXT["prompt"], SamplingParams(temperature=0, max_tokens=12, logprobs=0))
    text = output.outputs[0].text
    stop = [text[at : at + 3], text[at + 1 : at + 5], "never said"]
    want = min(text.find(one) + len(one) for one in stop[:2])
    body = TEXT | {"stop": stop}
    answer = whole(ask(one, "/v1/completions", body).json())
    assert joined(sse(ask(one, "/v1/completions", body | {"stream": True}))) == answer
    assert answer[0][1] == ["stop"] and len(answer[0][0]) < want and not any(s in answer[0][0] for s in stop)


@pytest.mark.parametrize("num_tokens", range(1, 8))
def test_characters_split_over_tokens_come_whole(one, num_tokens, llm):
    """D13: the tiny model is made to write 👍世, which are 7 tokens; a cut inside of one gives one defined tail."""
    ids = llm.tokenizer("👍世", add_special_tokens=False)["input_ids"]
    body = {"prompt": "a", "temperature": 0, "max_tokens": num_tokens, "structured_outputs": {"choice": ["👍世"]}}
    pytest.importorskip("xgrammar")
    assert len(ids) == 7
    want = llm.tokenizer.decode(ids[:num_tokens])
    chunks = sse(ask(one, "/v1/completions", body | {"stream": True}))
    ((text, _),) = joined(chunks).values()
    assert text == want == ask(one, "/v1/completions", body).json()["choices"][0]["text"]
    pieces = [choice["text"] for chunk in chunks for choice in chunk["choices"]]
    assert not any("�" in piece for piece in pieces[:-1])
    assert ("�" in text) == (num_tokens not in (4, 7))


@pytest.mark.parametrize("stop", [None, ["e"]])
def test_logprobs_of_a_stream_are_those_of_the_whole_answer(one, stop):
    chat = CHAT | {"logprobs": True, "top_logprobs": 2, "stop": stop}
    want = ask(one, "/v1/chat/completions", chat).json()["choices"][0]["logprobs"]["content"]
    chunks = sse(ask(one, "/v1/chat/completions", chat | {"stream": True}))
    parts = [choice["logprobs"] for chunk in chunks for choice in chunk["choices"] if choice["logprobs"]]
    assert [entry for part in parts for entry in part["content"]] == want

    text = TEXT | {"logprobs": 2, "echo": True, "stop": stop, "n": 2}
    want = ask(one, "/v1/completions", text).json()["choices"]
    for index, choice in enumerate(want):
        chunks = sse(ask(one, "/v1/completions", text | {"stream": True}))
        parts = [c["logprobs"] for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        for name, values in choice["logprobs"].items():
            assert [value for part in parts for value in part[name]] == values
        assert joined(chunks)[index][0] == choice["text"]


def test_what_is_wrong_before_the_first_token_is_no_stream(one):
    for change in ({"messages": []}, {"max_tokens": 0}, {"messages": [{"role": "user", "content": "x" * 500}]}):
        assert ask(one, "/v1/chat/completions", CHAT | change | {"stream": True}).status_code == 400


def test_what_goes_wrong_later_is_said_in_the_stream(one, llm, monkeypatch):
    trunks = llm.engine.runner._trunks

    def broken(*args):
        raise RuntimeError("out of luck")

    monkeypatch.setattr(llm.engine.runner, "_trunks", [*trunks[:2], (broken, *trunks[2][1:])])
    chunks = sse(ask(one, "/v1/completions", TEXT | {"stream": True}))
    assert chunks[-1]["error"]["code"] == "generation_failed"


def test_tiers_are_told_to_those_who_ask(one):
    chunks = sse(ask(one, "/v1/completions", TEXT | {"stream": True, "hispec_tiers": True}))
    reports = [choice["hispec"] for chunk in chunks for choice in chunk["choices"]]
    tokens = [token for report in reports for token in report["tokens"]]
    assert len(tokens) == TEXT["max_tokens"]
    assert {token["tier"] for token in tokens} <= {"draft", "intermediate", "target"}
    num_accepted = reports[-1]["judged"]["target"]["num_accepted"]
    assert 0 <= num_accepted <= reports[-1]["judged"]["target"]["num_draft_tokens"] > 0
    assert sum(token["tier"] != "target" for token in tokens) <= num_accepted
    plain = sse(ask(one, "/v1/completions", TEXT | {"stream": True}))
    assert joined(plain) == joined(chunks) and "hispec" not in str(plain)
    assert ask(one, "/v1/completions", TEXT | {"hispec_tiers": True}).json()["error"]["param"] == "hispec_tiers"


@pytest.mark.parametrize("fault", [RuntimeError, asyncio.CancelledError])
def test_a_stream_whose_events_cannot_be_closed_gives_its_place_back(monkeypatch, fault):
    async def events():
        try:
            yield "first"
        finally:
            raise fault

    async def send_first(self, *_):
        await anext(self._events)

    monkeypatch.setattr(streaming.EventSourceResponse, "__call__", send_first)
    ended = []
    stream = streaming.EventStream(events(), lambda: ended.append(True), send_timeout=1, drain_timeout=1)
    with pytest.raises(fault):
        asyncio.run(stream({}, None, None))
    assert ended == [True]
