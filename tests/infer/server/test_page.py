"""The page: what it is served with, and its own functions, run by Node.js where there is one."""

import asyncio
import base64
import hashlib
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.infer.server.harness import CHAT, ask, in_process, served, sse

HTML = (Path(__file__).parents[3] / "infer" / "server" / "page.html").read_text()
FUNCTIONS = re.search(r"// ---- text and tokens ----\n(.+?)// ---- page ----", HTML, flags=re.DOTALL)[1]


def test_it_is_served_and_may_run_its_own_script_alone(llm):
    async def main():
        async with in_process(one) as client:
            return await client.get("/")

    with served(llm) as one:
        response = asyncio.run(main())
    assert response.status_code == 200 and response.text == HTML
    policy = response.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy
    for tag in ("script", "style"):
        (content,) = re.findall(f"<{tag}>(.*?)</{tag}>", HTML, flags=re.DOTALL)
        assert base64.b64encode(hashlib.sha256(content.encode()).digest()).decode() in policy


def test_it_loads_nothing_and_puts_no_text_in_as_html():
    assert not re.search(
        r"(src|href|action)\s*=|https?:|innerHTML|insertAdjacentHTML|document\.write|eval\(| on\w+=", HTML
    )
    assert " style=" not in HTML  # the policy would not let it


def node(program):
    if shutil.which("node") is None:
        pytest.skip("needs Node.js")
    result = subprocess.run(["node", "-e", FUNCTIONS + program], capture_output=True, text=True, check=True)
    return json.loads(result.stdout)


def coloured(chunks):
    """What the page shows of (text, tokens) chunks: [[text, tier], …]."""
    return node(
        f"const s = makeSplitter(), c = {json.dumps(chunks)};"
        "console.log(JSON.stringify(c.flatMap(([text, tokens], i) => s(text, tokens, i === c.length - 1))))"
    )


def tokens(*pairs):
    return [{"text": text, "tier": tier} for text, tier in pairs]


@pytest.mark.parametrize(
    ("chunks", "want"),
    [
        ([["ab", tokens(("a", "draft"), ("b", "target"))]], [["a", "draft"], ["b", "target"]]),
        # a space that the token's own text lacks
        ([["a b", tokens(("a", "draft"), ("b", "target"))]], [["a", "draft"], [" b", "target"]]),
        # one character out of three tokens, then another token
        ([["👍x", tokens(("\ufffd", "draft"), ("\ufffd", "target"), ("\ufffd", "draft"), ("x", "target"))]],
         [["👍", "draft"], ["x", "target"]]),
        # text that was held back comes after its tokens, and special tokens have none
        ([["", tokens(("ab", "ngram"))], ["abc", tokens(("c", "target"))], ["", tokens(("", "draft"))]],
         [["ab", "ngram"], ["c", "target"]]),
        # a token that is given in two parts
        ([["a", tokens(("ab", "draft"))], ["b", []]], [["ab", "draft"]]),
        ([["tail", []]], [["tail", "target"]]),
    ],
)  # fmt: skip
def test_text_takes_the_colours_of_its_tokens(chunks, want):
    assert coloured(chunks) == want


def test_events_are_read_whatever_the_pieces():
    text = 'data: {"a": 1}\n\n: ping\n\ndata: [DONE]\n\n'
    for size in (1, 3, 100):
        pieces = [text[i : i + size] for i in range(0, len(text), size)]
        got = node(f"const r = makeEventReader(); console.log(JSON.stringify({json.dumps(pieces)}.flatMap(r)))")
        assert got == ['{"a": 1}', "[DONE]"]


def test_figures_say_what_was_accepted():
    judged = {"target": {"num_drafts": 4, "num_draft_tokens": 8, "num_accepted": 6}}
    said = node(
        "const m = makeMeter(); m.note(1, 1000); m.note(4, 2000); m.note(5, 4000);"
        f"console.log(JSON.stringify(figures({{draft: 6, target: 4}}, {json.dumps(judged)}, m)))"
    )
    assert said == (
        "10 tokens · 3.0 tokens/s · draft 60 % · target 40 % · accepted by target 75 % · 2.50 tokens per full pass"
    )


@pytest.mark.parametrize(
    ("notes", "want"),
    [
        ([], None),
        ([(4, 0)], None),  # one chunk has no speed
        ([(4, 500), (3, 1500), (3, 2500)], 3),  # what the first chunk brought took an unknown time
    ],
)
def test_speed_counts_what_came_after_the_first_chunk(notes, want):
    program = "const m = makeMeter();" + "".join(f"m.note({num}, {now});" for num, now in notes)
    assert node(program + "console.log(JSON.stringify(m.speed()))") == want


@pytest.mark.parametrize(
    ("fast", "plain", "want"),
    [
        (("a", 30), ("a", 20), "speed-up 1.50 × · same text"),
        (("a", 30), ("b", 20), "speed-up 1.50 × · the texts differ"),
        (("a", None), ("a", 20), "same text"),
    ],
)
def test_a_pair_of_answers_is_compared(fast, plain, want):
    pair = [{"text": text, "speed": speed} for text, speed in (fast, plain)]
    assert node(f"console.log(JSON.stringify(verdict(...{json.dumps(pair)})))") == want


@pytest.mark.parametrize("whole", ["half an ans", ""])
def test_an_answer_that_a_new_chat_broke_off_is_not_put_into_it(whole):
    program = (
        "const chat = makeChat(); chat.ask('old'); const close = chat.open(); chat.clear(); chat.ask('new');"
        f"close({json.dumps(whole)}); console.log(JSON.stringify(chat.messages()))"
    )
    assert node(program) == [{"role": "user", "content": "new"}]


@pytest.mark.parametrize(("whole", "roles"), [("an answer", ["user", "assistant"]), ("", [])])
def test_an_answer_joins_its_chat_and_a_question_without_one_leaves(whole, roles):
    program = (
        f"const chat = makeChat(); chat.ask('a question'); chat.open()({json.dumps(whole)});"
        "console.log(JSON.stringify(chat.messages().map((message) => message.role)))"
    )
    assert node(program) == roles


def test_a_real_stream_is_shown_whole(llm):
    with served(llm) as one:
        chunks = sse(ask(one, "/v1/chat/completions", CHAT | {"stream": True, "hispec_tiers": True}))
        want = ask(one, "/v1/chat/completions", CHAT).json()["choices"][0]["message"]["content"]
    choices = [chunk["choices"][0] for chunk in chunks if "hispec" in chunk["choices"][0]]
    parts = coloured([[c["delta"].get("content", ""), c["hispec"]["tokens"]] for c in choices])
    assert "".join(text for text, _ in parts) == want
    assert {tier for _, tier in parts} <= {"draft", "intermediate", "target"}
