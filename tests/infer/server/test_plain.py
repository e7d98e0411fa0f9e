"""`hispec_plain`: the request is decoded plainly, by the same engine."""

import pytest

from tests.infer.server.harness import CHAT, TEXT, ask, served, sse


@pytest.mark.parametrize(("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)])
@pytest.mark.parametrize("temperature", [0, 1.5])
def test_plain_decoding_gives_the_same_text_and_drafts_nothing(llm, path, body, temperature):
    asked = body | {"temperature": temperature, "seed": 3, "stream": True, "hispec_tiers": True}
    with served(llm) as one:
        streams = [sse(ask(one, path, asked | {"hispec_plain": plain})) for plain in (False, True)]
    texts, drafts = [], []
    for chunks in streams:
        choices = [chunk["choices"][0] for chunk in chunks]
        texts.append("".join(c["text"] if "text" in c else c["delta"].get("content", "") for c in choices))
        drafts.append(sum(judge["num_drafts"] for judge in choices[-1]["hispec"]["judged"].values()))
    assert texts[0] == texts[1] and drafts[0] > 0 == drafts[1]
