"""Random requests to both endpoints: whatever comes, the answer is 200 or a 400 that is JSON, and the server goes on.

Bodies are made of the fields that the server knows, with values that are right, just out of range, of another type or
shape, so that most get past the first check; some are no JSON at all. `HISPEC_FUZZ_REQUESTS` is how many.
"""

from __future__ import annotations

import asyncio
import json
import os
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from infer.server.protocol import ChatRequest, CompletionRequest
from tests.infer.server.harness import in_process, served, sse, strict_json

PATHS = {"/v1/chat/completions": ChatRequest, "/v1/completions": CompletionRequest}

small = st.integers(-3, 12)
huge = st.sampled_from([2**31, 2**63, 2**64, -(2**70), 10**40])
fractions = st.floats(-3, 3) | st.sampled_from([1e-320, 1e308, -0.0])
text = st.text(max_size=12) | st.sampled_from(
    ["", " ", "\x00", "\ud83d", "👍", "<eos>", "<|user|>", "{{ 7 * 7 }}", "a" * 300]
)
scalars = st.none() | st.booleans() | small | huge | fractions | text
anything = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3), max_leaves=6
)
ids = st.lists(st.integers(-1, 310), max_size=4)

contents = text | st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": text}), max_size=2)
roles = st.sampled_from(["system", "developer", "user", "assistant", "tool", "nobody"])
call = {"id": text, "type": st.just("function"), "function": st.fixed_dictionaries({"name": text, "arguments": text})}
extras = {"name": text, "tool_call_id": text, "tool_calls": st.lists(st.fixed_dictionaries(call), max_size=2)}
messages = st.lists(
    st.fixed_dictionaries({"role": roles, "content": contents}, optional=extras), min_size=1, max_size=3
)
tools = st.lists(
    st.fixed_dictionaries(
        {"type": st.just("function"), "function": st.fixed_dictionaries({"name": text, "parameters": st.just({})})}
    ),
    max_size=2,
)
schemas = st.sampled_from(
    [
        {"type": "object"},
        {"type": "integer"},
        {"enum": ["a", "b"]},
        {"type": "nothing"},
        {},
        {"$ref": "#/x"},
        {"format": "x"},
    ]
)
forms = st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "json_object", "json_schema", "xml"])},
    optional={"json_schema": st.fixed_dictionaries({"name": text, "schema": schemas})},
)
structures = st.fixed_dictionaries(
    {},
    optional={
        "json": schemas,
        "regex": st.sampled_from(["[ab]+", "(", "a{3}", "^x$", "(?=a)b"]),
        "choice": st.lists(text, max_size=3),
        "grammar": st.sampled_from(['root ::= "a"', "root ::=", ""]),
        "json_object": st.booleans(),
    },
)
RIGHT: dict[str, st.SearchStrategy[Any]] = {
    "messages": messages,
    "prompt": text | st.lists(text, min_size=1, max_size=2) | ids | st.lists(ids, min_size=1, max_size=2),
    "model": st.sampled_from(["tiny", None, "other"]),
    "stream": st.booleans(),
    "stream_options": st.fixed_dictionaries({}, optional={"include_usage": st.booleans()}),
    "response_format": forms,
    "structured_outputs": structures,
    "logit_bias": st.dictionaries(st.integers(-1, 310).map(str), st.floats(-101, 101), max_size=3),
    "stop": text | st.lists(text, max_size=3),
    "stop_token_ids": ids,
    "allowed_token_ids": ids,
    "bad_words": st.lists(text, max_size=3),
    "tools": tools,
    "tool_choice": st.sampled_from(["none", "auto", "required"]),
    "seed": small | huge,
    "user": text,
}
FLAGS = {"hispec_tiers", "hispec_plain", "ignore_eos", "skip_special_tokens", "include_stop_str_in_output", "echo"}
NUMBERS = {"temperature", "top_p", "presence_penalty", "frequency_penalty", "min_p", "repetition_penalty"}


def of_field(name: str, path: str) -> st.SearchStrategy[Any]:
    """Mostly what the field takes, now and then something else."""
    if name in RIGHT:
        right = RIGHT[name]
    elif name in FLAGS or (name == "logprobs" and "chat" in path):
        right = st.booleans()
    else:
        right = fractions if name in NUMBERS else small
    return st.integers(0, 19).flatmap(lambda number: anything if number == 0 else right)


def bodies(path: str) -> st.SearchStrategy[bytes]:
    names = PATHS[path].model_fields
    needed = {"messages" if "chat" in path else "prompt", "max_tokens"}
    optional = {name: of_field(name, path) for name in names if name not in needed}
    # Few fields at once: with all of them nearly every body would be refused for one of them
    chosen = st.lists(st.sampled_from(sorted(optional)), max_size=4, unique=True)
    objects = chosen.flatmap(
        lambda some: st.fixed_dictionaries(
            {name: of_field(name, path) for name in sorted(needed)} | {name: optional[name] for name in some}
        )
    )
    odd = st.binary(max_size=40) | anything.map(as_bytes) | st.dictionaries(text, anything, max_size=3).map(as_bytes)
    return st.integers(0, 19).flatmap(lambda number: odd if number == 0 else objects.map(as_bytes))


def as_bytes(value: Any) -> bytes:
    return json.dumps(value).encode()


def check(response: Any) -> None:
    assert response.status_code in (200, 400, 404), (response.status_code, response.text)
    if response.status_code != 200:
        assert strict_json(response.text)["error"]["message"] and len(response.content) < 10_000
    elif response.headers["content-type"].startswith("text/event-stream"):
        for chunk in sse(response):
            error = chunk.get("error")
            assert error is None or error["code"] == "no_token_allowed", error  # a rule that leaves nothing to pick
    else:
        assert strict_json(response.text)["choices"]


def fuzz(llm: Any, num_requests: int, *, derandomize: bool = False) -> dict[int, int]:
    """How many answers had which status.

    derandomize: ask the same every time, so that a few requests are of every kind each time.
    """
    seen: dict[int, int] = {}
    each = st.sampled_from(sorted(PATHS)).flatmap(lambda path: st.tuples(st.just(path), bodies(path)))

    with served(llm) as one, asyncio.Runner() as runner:
        context = in_process(one, **{"Content-Type": "application/json"})
        client = runner.run(context.__aenter__())

        @settings(
            max_examples=num_requests, deadline=None, database=None, suppress_health_check=list(HealthCheck),
            derandomize=derandomize,
        )  # fmt: skip
        @given(each)
        def ask(request: tuple[str, bytes]) -> None:
            path, body = request
            response = runner.run(client.post(path, content=body))
            seen[response.status_code] = seen.get(response.status_code, 0) + 1
            check(response)

        try:
            ask()
        finally:
            runner.run(context.__aexit__(None, None, None))
    return seen


def test_no_request_is_a_fault(llm):
    seen = fuzz(llm, 200, derandomize=True)
    assert seen.get(200, 0) > 4 and seen.get(400, 0) > 4, seen


@pytest.mark.slow
def test_no_request_of_ten_thousand_is_a_fault(llm, record_property):
    seen = fuzz(llm, int(os.environ.get("HISPEC_FUZZ_REQUESTS", "10000")))
    print(f"statuses: {seen}")
    assert seen.get(200, 0) > sum(seen.values()) // 20, seen
