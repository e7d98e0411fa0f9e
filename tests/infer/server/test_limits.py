"""Bad input of every kind: a 400 that names the field, at once and in few bytes, and the server goes on."""

import asyncio
import random
import time

import httpx
import pytest

from tests.infer.server.harness import CHAT, MODEL, TEXT, ask, in_process, on_port, served, strict_json

CHATS, TEXTS = "/v1/chat/completions", "/v1/completions"
MIB = 1 << 20


@pytest.fixture(scope="module")
def one(llm):
    with served(llm, max_body_bytes=MIB) as one:
        yield one


def check_refused(response, param=None):
    assert response.status_code == 400, response.text
    assert len(response.content) <= 10_000
    error = strict_json(response.text)["error"]
    assert error["message"] and (param is None or error["param"] == param), error


def ask_all(one, path, bodies):
    """Answers to all of them over one client, as text where a body is no JSON for Python."""

    async def main():
        async with in_process(one, **{"Content-Type": "application/json"}) as client:
            how = [{"json": body} if isinstance(body, dict) else {"content": body} for body in bodies]
            return [await client.post(path, **one_way) for one_way in how]

    return asyncio.run(main())


def with_raw(base, field, value):
    """The body with a field whose value is written as it stands, JSON or not."""
    import json

    return json.dumps(base | {field: "@"}).replace('"@"', value).encode()


BAD = {
    # D03
    "max_tokens": ["0", "-1", '"5"', "1e9", "1.5", "true", "[]", "{}"],
    # D08
    "temperature": ["-1", "NaN", "Infinity", "1e999", '"1"', "true"],
    "top_p": ["0", "-0.1", "1.1", "NaN", "null1"],
    "top_k": ["-5", "1.5", "1e400"],
    "min_p": ["-0.1", "2"],
    "repetition_penalty": ["0", "-1", "NaN", "Infinity"],
    "presence_penalty": ["-2.1", "3"],
    "frequency_penalty": ["-2.1", "3"],
    "stop": ['""', '[""]', "[" + ",".join(['"a"'] * 1000) + "]", "5", "[5]", '{"a": 1}'],
    "n": ["0", "-1", "1000000", "1.5", "129"],
    "seed": ["1.5", '"1"', "1" + "0" * 30],
    "min_tokens": ["-1", "50"],
    "stop_token_ids": ["[-1]", "[300]", "[1.5]", "5"],
    "allowed_token_ids": ["[]", "[-1]", "[300]", '["a"]'],
    "bad_words": ['[""]', '"a"', "[1]"],
    # D04
    "logit_bias": [
        '{"300": 1}', '{"-1": 1}', '{"AI": 1}', '{"5": 1000}', '{"5": -1000}', '{"5": NaN}', '{"5": "1"}',
        '{"5": 1, "05": 2}', "[1]", "{" + ",".join(f'"{i}": 1' for i in range(1025)) + "}",
        '{"1000000000000000000000": 1}',
    ],
}  # fmt: skip


@pytest.mark.parametrize("field", BAD)
def test_values_out_of_range_are_refused_by_field(one, field):
    for path, base in ((CHATS, CHAT), (TEXTS, TEXT)):
        for value, response in zip(
            BAD[field], ask_all(one, path, [with_raw(base, field, v) for v in BAD[field]]), strict=True
        ):
            check_refused(response, None if value == "null1" else field)
    assert ask(one, TEXTS, TEXT).status_code == 200


def test_the_ends_of_the_ranges_are_allowed(one):
    for change in (
        {"max_tokens": None}, {"max_tokens": 10**9}, {"top_p": 1e-9}, {"temperature": 1e-39}, {"top_k": -1},
        {"seed": 2**64 - 1}, {"logit_bias": {"299": -100}}, {"repetition_penalty": 0.01}, {"n": 4},
    ):  # fmt: skip
        assert ask(one, TEXTS, TEXT | {"max_tokens": 3} | change).status_code == 200, change


def test_a_tiny_nucleus_keeps_one_token(one):
    sampled = ask(one, TEXTS, TEXT | {"temperature": 1, "seed": 1, "top_p": 1e-9}).json()
    assert sampled["choices"] == ask(one, TEXTS, TEXT).json()["choices"]


@pytest.mark.parametrize(
    "prompt",
    ["[-1]", "[300]", "[1.5]", "[[1], 2]", "[[[1]]]", "[[-1]]", "[[1], [300]]", '[1, "a"]', '["a", 1]', "[true]",
     '""', "[]", '[""]', "[[]]", '["a", ""]', "null", "5", "{}", "[null]", "[18446744073709551616]"],
)  # fmt: skip
def test_bad_prompts_are_refused(one, prompt):
    """D05, A17"""
    (response,) = ask_all(one, TEXTS, [with_raw(TEXT, "prompt", prompt)])
    check_refused(response, "prompt")


def test_lists_of_ids_are_prompts_of_their_own(one):
    assert len(ask(one, TEXTS, TEXT | {"prompt": [[1], [2]]}).json()["choices"]) == 2


BAD_CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{"}}


@pytest.mark.parametrize(
    "messages",
    [[], None, "hello", [None], [{}], [{"role": "user"}], [{"role": "user", "content": None}], [{"content": "x"}],
     [{"role": "boss", "content": "x"}], [{"role": "user", "content": 5}], [{"role": "user", "content": [5]}],
     [{"role": "user", "content": "x", "tone": "kind"}], [{"role": "assistant", "content": None, "tool_calls": []}],
     [{"role": "assistant", "tool_calls": [BAD_CALL]}]],
)  # fmt: skip
def test_bad_messages_are_refused(one, messages):
    check_refused(ask(one, CHATS, CHAT | {"messages": messages}), "messages")


def test_a_refused_request_that_is_logged_gives_its_place_back(llm):
    with served(llm, log_prompts=True) as one:
        bad = {"messages": [{"role": "assistant", "tool_calls": [BAD_CALL]}]}
        check_refused(ask(one, CHATS, CHAT | bad), "messages")
        assert one.gate.num_texts == 0 and not one.gate.tickets


def test_a_template_that_refuses_is_the_clients_mistake(one, llm, monkeypatch):
    monkeypatch.setattr(llm.tokenizer, "chat_template", "{{ raise_exception('roles must alternate') }}")
    response = ask(one, CHATS, CHAT)
    check_refused(response, "messages")
    assert "roles must alternate" in response.text


def test_a_prompt_that_leaves_no_room_is_refused_with_both_numbers(one):
    """A18"""
    for num, status in ((63, 200), (64, 400), (65, 400)):
        response = ask(one, TEXTS, {"prompt": [5] * num, "max_tokens": 50, "temperature": 0, "ignore_eos": True})
        assert response.status_code == status
        if status == 400:
            error = response.json()["error"]
            assert error["code"] == "context_length_exceeded" and error["param"] == "prompt"
            assert str(num) in error["message"] and "64" in error["message"]
        else:
            assert response.json()["usage"]["completion_tokens"] == 1
    error = ask(one, CHATS, CHAT | {"messages": [{"role": "user", "content": "x" * 100}]}).json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"5", b'"x"', b"null", b"\xff\xfe", b'{"model": "\xff"}', b'{"prompt": "\\ud800"}',
     b"{" * 3000, b'{"prompt": ' + b"[" * 3000 + b"]" * 3000 + b"}", b'{"n": ' + b"9" * 5000 + b"}",
     b'{"prompt": "a", "structured_outputs": {"json": {"a": NaN}}}', b'{"prompt": "a\\u0000", "stop": "\\udfff"}'],
    ids=range(14),
)  # fmt: skip
def test_bodies_that_are_no_request_are_refused(one, body):
    for path in (CHATS, TEXTS):
        check_refused(ask_all(one, path, [body])[0])


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHATS, CHAT | {"messages": [{"role": "x" * 20}] * 3000}),
        (TEXTS, TEXT | {"prompt": [1] * 3000 + ["x" * 1000]}),
        (TEXTS, TEXT | {"prompt": ["x" * 1000] * 300}),
        (TEXTS, TEXT | {"stop": ["s" * 100] * 3000}),
        (TEXTS, TEXT | {"bad_words": [""] * 3000}),
        (TEXTS, TEXT | {"x" * 20_000: 1}),
        (TEXTS, TEXT | {f"unknown{i}": i for i in range(3000)}),
        (TEXTS, TEXT | {"model": "m" * 20_000}),
        (TEXTS, TEXT | {"structured_outputs": {"regex": "(" * 20_000}}),
    ],
    ids=range(9),
)
def test_thousands_of_bad_items_make_a_small_error(one, path, body):
    """D09"""
    response = ask(one, path, body)
    assert response.status_code in (400, 404) and len(response.content) <= 10_000, len(response.content)


def test_bodies_that_are_too_large_are_refused_at_once(one):
    """D09: 50 MB with and without Content-Length, and one that lies about it."""
    block = b"x" * MIB

    def blocks():
        for _ in range(50):
            yield block

    headers = {"Content-Type": "application/json"}
    with on_port(one) as address, httpx.Client(base_url=address, headers=headers, timeout=30) as client:
        for content in (block * 50, blocks()):
            began = time.monotonic()
            response = client.post(CHATS, content=content)
            assert response.status_code == 413 and response.json()["error"]["code"] == "body_too_large"
            assert time.monotonic() - began < 5
        assert client.post(TEXTS, json=TEXT).status_code == 200


def test_the_largest_body_that_is_allowed_is_read(one):
    assert ask(one, TEXTS, b" " * MIB).status_code == 400
    assert ask(one, TEXTS, b" " * (MIB + 1)).status_code == 413


def test_a_client_that_never_ends_its_body_is_let_go(llm):
    async def never():
        yield b"{"
        await asyncio.sleep(60)

    async def main(one):
        async with in_process(one, **{"Content-Type": "application/json"}) as client:
            return await client.post(TEXTS, content=never())

    with served(llm, body_timeout=0.2) as one:
        assert asyncio.run(main(one)).status_code == 408


def test_the_server_answers_while_a_prompt_is_tokenized(one, llm, monkeypatch):
    """D09"""
    make_request = llm.make_request

    def slow(*args, **options):
        time.sleep(0.8)
        return make_request(*args, **options)

    monkeypatch.setattr(llm, "make_request", slow)

    async def main():
        async with in_process(one) as client:
            running = asyncio.create_task(client.post(TEXTS, json=TEXT))
            await asyncio.sleep(0.1)
            began = time.monotonic()
            assert (await client.get("/health")).status_code == 200
            assert time.monotonic() - began < 0.5 and not running.done()
            assert (await running).status_code == 200

    asyncio.run(main())


def test_noise_never_makes_a_fault(one):
    """A small fuzz: fields of both endpoints with values of all kinds."""
    generator = random.Random(0)
    values = [
        None, True, 0, 1, -1, 2, 3.5, 1e308, 2**70, "", "a", "\u0000", "é" * 50, [], [0], [[]], ["a"], [None], {},
        {"a": 1}, {"5": 1}, {"type": "json_object"}, {"type": "text"}, {"include_usage": True},
        [{"role": "user", "content": "x"}],
    ]  # fmt: skip
    from infer.server.protocol import ChatRequest, CompletionRequest

    for path, base, kind in ((CHATS, CHAT, ChatRequest), (TEXTS, TEXT, CompletionRequest)):
        bodies = []
        for _ in range(120):
            names = generator.sample(list(kind.model_fields), generator.randint(1, 2))
            bodies.append(base | {"max_tokens": 2} | {name: generator.choice(values) for name in names})
        for body, response in zip(bodies, ask_all(one, path, bodies), strict=True):
            assert response.status_code in (200, 400, 404), (body, response.text)
            if response.status_code != 200:
                check_refused(response) if response.status_code == 400 else None
    assert ask(one, TEXTS, TEXT | {"model": MODEL}).status_code == 200
