"""Answers are what `LLM` gives, in OpenAI's shapes; what can't be done is refused by name."""

import asyncio
import math
import sys

import openai
import pytest

from infer.params import SamplingParams
from infer.structured_outputs import StructuredOutputsParams
from tests.infer.server.harness import CHAT, MODEL, TEXT, ask, in_process, official, on_port, served, sse, strict_json

MESSAGES = CHAT["messages"]
PROMPT = TEXT["prompt"]
WAYS = [
    {"temperature": 0},
    {"temperature": 0.9, "seed": 7},
    {"temperature": 0.9, "seed": 7, "n": 3, "top_p": 0.9},
    {"temperature": 0.8, "seed": 3, "presence_penalty": 1.5, "frequency_penalty": -0.5},
    {"temperature": 0, "stop": ["wor", "e"]},
    {"temperature": 0, "stop": "wor", "include_stop_str_in_output": True},
    {"temperature": 1.2, "seed": 1, "top_k": 5, "min_p": 0.01, "repetition_penalty": 1.3},
    {"temperature": 0, "min_tokens": 4, "ignore_eos": True, "stop_token_ids": [17], "skip_special_tokens": False},
    {"temperature": 0, "allowed_token_ids": [40, 41, 42], "bad_words": ["e"]},
]


@pytest.fixture(scope="module")
def one(llm):
    with served(llm) as one:
        yield one


@pytest.fixture(scope="module")
def client(one):
    with on_port(one) as address:
        yield official(address)


def texts(output):
    return [(text.index, text.text, text.finish_reason) for text in output.outputs]


def refusal(one, path, body):
    """The error of a body that must be refused."""
    response = ask(one, path, body)
    assert response.status_code == 400, response.text
    assert len(response.content) <= 10_000
    error = strict_json(response.text)["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["type"] == "invalid_request_error"
    return error


# ---- equal to LLM ----


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_texts_are_those_of_reference(one, way, reference):
    params = SamplingParams(max_tokens=12, **way)
    (want,) = reference.generate(PROMPT, params)
    got = ask(one, "/v1/completions", {"prompt": PROMPT, "max_tokens": 12, **way}).json()
    assert [(c["index"], c["text"], c["finish_reason"]) for c in got["choices"]] == texts(want)
    num = sum(len(text.token_ids) for text in want.outputs)
    num_prompt = len(want.prompt_token_ids)
    assert got["usage"] == {
        "prompt_tokens": num_prompt, "completion_tokens": num, "total_tokens": num_prompt + num,
    }  # fmt: skip

    (want,) = reference.chat(MESSAGES, params)
    got = ask(one, "/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 12, **way}).json()
    assert [(c["index"], c["message"]["content"], c["finish_reason"]) for c in got["choices"]] == texts(want)


def test_logit_bias_is_applied(one, reference):
    bias = {40: 100.0, 41: -100.0}
    (want,) = reference.generate(PROMPT, SamplingParams(temperature=0, max_tokens=12, logit_bias=bias))
    got = ask(one, "/v1/completions", TEXT | {"logit_bias": {"40": 100, "41": -100}}).json()
    assert got["choices"][0]["text"] == want.outputs[0].text != ask(one, "/v1/completions", TEXT).json()["choices"][0]


def test_the_official_client_is_answered(client, reference):
    params = SamplingParams(temperature=0, max_tokens=12)
    answer = client.chat.completions.create(**CHAT)
    assert answer.choices[0].message.content == reference.chat(MESSAGES, params)[0].outputs[0].text
    assert (answer.model, answer.object, answer.choices[0].message.role) == (MODEL, "chat.completion", "assistant")
    answer = client.completions.create(**TEXT)
    assert answer.choices[0].text == reference.generate(PROMPT, params)[0].outputs[0].text
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.chat.completions.create(**CHAT | {"temperature": -1})


def test_prompts_come_in_four_forms(one, llm, reference):
    ids = [list(llm.tokenizer(text)["input_ids"]) for text in (PROMPT, "by the river")]
    params = SamplingParams(temperature=0.9, seed=2, max_tokens=6, n=2)
    body = {"temperature": 0.9, "seed": 2, "max_tokens": 6, "n": 2}
    for prompt, want in [
        (PROMPT, [PROMPT]),
        ([PROMPT, "by the river"], [PROMPT, "by the river"]),
        (ids[0], [ids[0]]),
        (ids, ids),
    ]:
        got = ask(one, "/v1/completions", {"prompt": prompt, **body}).json()["choices"]
        outputs = [text for output in reference.generate(want, params) for text in output.outputs]
        assert [c["text"] for c in got] == [text.text for text in outputs]
        assert [c["index"] for c in got] == list(range(len(outputs)))


def test_lengths_default_as_with_openai(one):
    assert ask(one, "/v1/completions", {"prompt": "a", "ignore_eos": True}).json()["usage"]["completion_tokens"] == 16
    usage = ask(one, "/v1/chat/completions", {"messages": MESSAGES, "ignore_eos": True}).json()["usage"]
    assert usage["total_tokens"] == 64  # the model's length


def test_messages_of_every_kind_reach_the_template(one, reference):
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "A"}, {"type": "text", "text": "B"}]},
    ]
    want = reference.chat(
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "A\nB"}],
        SamplingParams(temperature=0, max_tokens=4),
    )
    got = ask(one, "/v1/chat/completions", CHAT | {"messages": messages, "max_tokens": 4})
    assert got.json()["choices"][0]["message"]["content"] == want[0].outputs[0].text


# ---- log probabilities ----


@pytest.mark.parametrize("num", [0, 3])
def test_logprobs_are_the_runtimes(one, reference, num):
    params = SamplingParams(temperature=0, max_tokens=6, logprobs=num)
    text = reference.chat(MESSAGES, params)[0].outputs[0]
    body = CHAT | {"max_tokens": 6, "logprobs": True, "top_logprobs": num}
    content = ask(one, "/v1/chat/completions", body).json()["choices"][0]["logprobs"]["content"]
    assert len(content) == len(text.token_ids) == 6
    for token_id, entry, got in zip(text.token_ids, text.logprobs, content, strict=True):
        assert got["logprob"] == pytest.approx(entry[token_id].logprob)  # verified in one call, decoded in another
        assert got["token"] == entry[token_id].decoded_token
        assert got["bytes"] == (None if "�" in got["token"] else list(got["token"].encode()))
        best = sorted((one.logprob for one in entry.values()), reverse=True)[:num]
        assert [top["logprob"] for top in got["top_logprobs"]] == pytest.approx(best)


@pytest.mark.parametrize("form", ["text", "ids"])
def test_echo_gives_the_prompt_and_its_logprobs(one, llm, form, reference):
    """What lm-eval asks for: one token, echo, logprobs=1."""
    ids = list(llm.tokenizer(PROMPT)["input_ids"])
    (want,) = reference.generate(PROMPT, SamplingParams(temperature=0, max_tokens=1, logprobs=1, prompt_logprobs=1))
    body = {"max_tokens": 1, "temperature": 0, "logprobs": 1, "echo": True, "seed": 1234}
    got = ask(one, "/v1/completions", {"prompt": PROMPT if form == "text" else [ids], **body}).json()["choices"][0]
    assert got["text"] == PROMPT + want.outputs[0].text
    logprobs = got["logprobs"]
    pairs = [
        *zip(ids[1:], want.prompt_logprobs[1:], strict=True),
        (want.outputs[0].token_ids[0], want.outputs[0].logprobs[0]),
    ]
    assert logprobs["token_logprobs"] == [None, *(pytest.approx(entry[i].logprob) for i, entry in pairs)]
    assert logprobs["top_logprobs"][0] is None and len(logprobs["top_logprobs"]) == len(ids) + 1
    assert "".join(logprobs["tokens"][: len(ids)]) == PROMPT
    for token, offset in zip(logprobs["tokens"][: len(ids)], logprobs["text_offset"], strict=False):
        assert PROMPT[offset:].startswith(token)
    for (i, entry), token, top in zip(pairs, logprobs["tokens"][1:], logprobs["top_logprobs"][1:], strict=True):
        assert token == entry[i].decoded_token and token in top


@pytest.mark.parametrize("stream", [False, True])
def test_echo_without_a_text_gives_the_prompt_alone(one, llm, stream):
    """max_tokens=0, as with OpenAI and vLLM."""
    ids = list(llm.tokenizer(PROMPT)["input_ids"])
    body = {"prompt": [PROMPT, "by the river"], "logprobs": 2, "echo": True, "temperature": 0, "n": 2}
    with_text = ask(one, "/v1/completions", body | {"max_tokens": 1}).json()["choices"][0]["logprobs"]
    alone = body | {"max_tokens": 0}
    if stream:
        chunks = sse(ask(one, "/v1/completions", alone | {"stream": True, "stream_options": {"include_usage": True}}))
        *chunks, last = chunks
        choices = sorted((choice for chunk in chunks for choice in chunk["choices"]), key=lambda one: one["index"])
        usage = last["usage"]
    else:
        got = ask(one, "/v1/completions", alone).json()
        choices, usage = got["choices"], got["usage"]
    assert [choice["text"] for choice in choices] == [PROMPT, PROMPT, "by the river", "by the river"]
    assert {choice["finish_reason"] for choice in choices} == {"length"}
    assert usage["completion_tokens"] == 0 and usage["prompt_tokens"] == usage["total_tokens"] > len(ids)
    found = choices[0]["logprobs"]
    assert len(found["tokens"]) == len(ids)
    for name, values in found.items():
        assert values == with_text[name][: len(ids)], name
    plain = ask(one, "/v1/completions", {"prompt": PROMPT, "echo": True, "max_tokens": 0}).json()["choices"][0]
    assert plain["text"] == PROMPT and plain["logprobs"] is None


def test_no_text_at_all_is_refused(one):
    got = ask(one, "/v1/completions", {"prompt": PROMPT, "max_tokens": 0})
    assert got.status_code == 400 and got.json()["error"]["param"] == "max_tokens"


def test_a_logprob_that_json_has_no_number_for_becomes_openais_lowest():
    """D07"""
    from infer.output import Logprob
    from infer.server.answers import chat_logprobs, completion_logprobs, dumps

    entry = {5: Logprob(-math.inf, 3, "a"), 6: Logprob(math.nan, 1, "b"), 7: Logprob(-1e30, 2, "c")}
    for made in (chat_logprobs([5], [entry], 2), completion_logprobs([5], [entry], 0)):
        assert strict_json(dumps(made)) == made and "-9999.0" in dumps(made)


# ---- forms and tools ----


SCHEMA = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"], "additionalProperties": False}


@pytest.mark.parametrize(
    "field",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA, "strict": True}}},
        {"structured_outputs": {"json": SCHEMA}},
    ],
)
def test_a_schema_is_kept_to(one, reference, field):
    pytest.importorskip("xgrammar")
    params = SamplingParams(temperature=0, max_tokens=30, structured_outputs=StructuredOutputsParams(json=SCHEMA))
    got = ask(one, "/v1/chat/completions", CHAT | {"max_tokens": 30} | field).json()["choices"][0]
    assert got["message"]["content"] == reference.chat(MESSAGES, params)[0].outputs[0].text


def test_a_choice_is_kept_to_and_plain_text_is_no_form(one):
    pytest.importorskip("xgrammar")
    got = ask(one, "/v1/completions", TEXT | {"structured_outputs": {"choice": ["river", "stone"]}}).json()
    assert got["choices"][0]["text"] in ("river", "stone")
    plain = ask(one, "/v1/completions", TEXT).json()["choices"][0]["text"]
    got = ask(one, "/v1/completions", TEXT | {"response_format": {"type": "text"}}).json()
    assert got["choices"][0]["text"] == plain


def test_without_xgrammar_a_form_is_refused_with_the_remedy(one, llm, monkeypatch):
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    monkeypatch.setattr(llm._maker._grammars, "_compiler", None)
    error = refusal(one, "/v1/chat/completions", CHAT | {"response_format": {"type": "json_object"}})
    assert error["param"] == "response_format" and "hispec[structured]" in error["message"]


TOOL = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}
TOOL_TEMPLATE = (
    "{% for t in tools or [] %}{{ t.function.name }};{% endfor %}"
    "{% for m in messages %}{{ m.role }}:{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}({{ c.function.arguments.at }}){% endfor %}|{% endfor %}"
)


def test_tools_are_for_templates_that_know_them(one, llm, monkeypatch, reference):
    assert refusal(one, "/v1/chat/completions", CHAT | {"tools": [TOOL]})["param"] == "tools"
    assert ask(one, "/v1/chat/completions", CHAT | {"tools": [TOOL], "tool_choice": "none"}).status_code == 200
    monkeypatch.setattr(llm.tokenizer, "chat_template", TOOL_TEMPLATE)
    call = {"id": "1", "type": "function", "function": {"name": "now", "arguments": '{"at": "noon"}'}}
    messages = [
        MESSAGES[0],
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "12", "tool_call_id": "1"},
    ]
    got = ask(one, "/v1/chat/completions", CHAT | {"tools": [TOOL], "messages": messages, "max_tokens": 4}).json()
    rendered = "now;user:Hello, river!|assistant:now(noon)|tool:12|"
    (want,) = reference.generate(rendered, SamplingParams(temperature=0, max_tokens=4))
    assert got["choices"][0]["message"]["content"] == want.outputs[0].text
    assert got["usage"]["prompt_tokens"] == len(want.prompt_token_ids)


# ---- refused ----


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"functions": []}, "functions"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"prompt": "x"}, "prompt"),
        ({"echo": True}, "echo"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options"),
        ({"max_completion_tokens": 5}, "max_completion_tokens"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"structured_outputs": {"yaml": 1}}, "structured_outputs"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs"),
        ({"spaces_between_special_tokens": False}, "spaces_between_special_tokens"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages"),
    ],
    ids=str,
)
def test_what_is_not_done_is_refused_by_name(one, change, param):
    error = refusal(one, "/v1/chat/completions", CHAT | change)
    assert error["param"] == param and param in error["message"]


@pytest.mark.parametrize(
    "change", [{"suffix": "x"}, {"best_of": 3}, {"messages": []}, {"logprobs": 21}, {"logprobs": True}]
)
def test_what_completions_do_not_do_is_refused_by_name(one, change):
    (param,) = change
    assert refusal(one, "/v1/completions", TEXT | change)["param"] == param


def test_null_is_the_same_as_leaving_a_field_out(one):
    plain = ask(one, "/v1/chat/completions", CHAT).json()["choices"]
    names = ("n", "stop", "seed", "logprobs", "tools", "response_format", "stream", "user", "top_p", "logit_bias")
    assert ask(one, "/v1/chat/completions", CHAT | dict.fromkeys(names)).json()["choices"] == plain


def test_errors_have_openais_shape_on_every_path(one):
    async def main():
        async with in_process(one) as client:
            for method, path, status in [
                ("GET", "/nope", 404),
                ("GET", "/v1/chat/completions", 405),
                ("POST", "/v1/models", 405),
                ("GET", "/v1/models/other", 404),
            ]:
                response = await client.request(method, path)
                assert response.status_code == status
                assert set(response.json()["error"]) == {"message", "type", "param", "code"}
            wrong = await client.post("/v1/chat/completions", json=CHAT | {"model": "gpt-4"})
            assert (wrong.status_code, wrong.json()["error"]["param"]) == (404, "model")
            plain = await client.post("/v1/chat/completions", content=b"{}", headers={"Content-Type": "text/plain"})
            assert plain.status_code == 415

    asyncio.run(main())


@pytest.mark.parametrize("fault", [ZeroDivisionError, ValueError])
def test_a_fault_of_ours_is_told_without_its_insides_and_counted_as_one(one, monkeypatch, fault):
    def broken(*_):
        raise fault("an inside")

    def num_faults():
        labels = {"route": "/v1/completions", "status": "500"}
        return one.app.state.metrics.registry.get_sample_value("hispec:http_requests_total", labels) or 0

    before, logged = num_faults(), []
    monkeypatch.setattr("infer.server.guard.logger.info", lambda _, extra: logged.append(extra["facts"]["status"]))
    monkeypatch.setattr("infer.server.app.usage", broken)
    response = ask(one, "/v1/completions", TEXT)
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "internal_error" and "inside" not in response.text
    assert num_faults() == before + 1 and logged == [500]


def test_a_text_that_a_fault_cut_short_is_an_error(one, llm, monkeypatch):
    trunks = llm.engine.runner._trunks

    def broken(*args):
        raise RuntimeError("out of luck")

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.runner, "_trunks", [*trunks[:2], (broken, *trunks[2][1:])])
        response = ask(one, "/v1/completions", TEXT)
    assert response.status_code == 500 and response.json()["error"]["code"] == "generation_failed"
    assert ask(one, "/v1/completions", TEXT).status_code == 200


def test_rules_that_leave_no_token_are_the_clients_mistake(one):
    response = ask(one, "/v1/completions", TEXT | {"allowed_token_ids": [0], "min_tokens": 4})
    assert response.status_code == 400 and response.json()["error"]["code"] == "no_token_allowed"
