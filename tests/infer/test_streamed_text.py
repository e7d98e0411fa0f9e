"""What a user sees of a text while its tokens come in accepted blocks: any text, tokens, drafts and stop strings.

The target is told what to pick, as the lower exits are; the programs compute nothing. So a text of choice goes through
the engine, a token per round in plain decoding and a block per round otherwise (D12, D13, A03).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infer.params import SamplingParams
from infer.request import Request
from infer.strategy import Policy
from tests.infer.byte_pieces import cut_at_stop, stop_strings, texts
from tests.infer.patterns import PATTERNS
from tests.tiny_artifact import VOCAB_SIZE, make_tokenizer
from tests.tiny_engine import STRATEGIES, Script, Tiny, make_model, stub_programs

PROMPT = (1, 2, 3)
CASES = [("autoregressive", (1, 1, 1)), ("layerskip", (5, 1, 1)), ("hispec", (2, 4, 4)), ("hispec", (5, 7, 3))]
ALPHABET = "alphabet: ABCDEFGHIJKLMNOPQRSTUVWXYZ"
CHARACTERS = "👍 世界 삼겹살 👨‍👩‍👧‍👦 naïve"


class Told(Script):
    """A script for all exits: the target's picks are always the text's tokens."""

    rigs_target = True

    def __call__(self, row, tier, position, logits):  # type: ignore[no-untyped-def]
        if tier < 2:
            return super().__call__(row, tier, position, logits)
        text = self._texts[PROMPT]
        return logits.index_fill(0, logits.new_tensor([text[position] if position < len(text) else 0]).long(), 10.0)


@functools.cache
def model():  # type: ignore[no-untyped-def]
    return make_model(vocab_size=VOCAB_SIZE + 10)  # padded, as many models are: the last ids have no text


@functools.cache
def tokenizer():  # type: ignore[no-untyped-def]
    return make_tokenizer()


def chunks_of(
    token_ids: Sequence[int],
    decoder: object,
    strategy: str,
    policy: tuple[int, int, int],
    pattern: str,
    **fields: object,
) -> tuple[list[str], Request]:
    """The pieces of text that a stream shows, round after round, and the request at its end."""
    rig = Told({PROMPT: [*PROMPT, *token_ids]}, PATTERNS[pattern])
    numbers = Policy(num_draft_tokens=policy[0], window=policy[1], inner_rounds=policy[2])
    tiny = Tiny(model(), strategy, numbers, rig=rig)
    stub_programs(tiny)
    request = tiny.request(PROMPT, SamplingParams(temperature=0, **{"max_tokens": len(token_ids), **fields}))
    request.detokenizer._tokenizer = decoder
    tiny.engine.add(request)
    chunks, shown = [], ""
    while not request.is_finished:
        tiny.engine.step()
        text = request.output().outputs[0].text
        assert text.startswith(shown)
        chunks.append(text[len(shown) :])
        shown = text
    return chunks, request


def encode(text: str) -> list[int]:
    return list(tokenizer()(text, add_special_tokens=False)["input_ids"])


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize(("strategy", "policy"), CASES)
def test_a_stop_string_split_over_tokens_and_blocks_leaves_no_trace(strategy, policy, pattern):
    ids = encode(ALPHABET)
    for stop in (["DEFGHIJ"], ["KLM", "DEFGHIJ", "GHIJK"], ["DEX", "never", "DEFGHIJ"]):
        chunks, request = chunks_of(ids, tokenizer(), strategy, policy, pattern, stop=stop)
        assert "".join(chunks) == request.text == "alphabet: ABC"
        assert (request.finish_reason, request.stop_reason) == ("stop", "DEFGHIJ")
        assert request.token_ids == ids[: len(request.token_ids)]
        assert tokenizer().decode(request.token_ids).endswith("DEFGHIJ")  # every letter is a token of its own


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize(("strategy", "policy"), CASES)
def test_no_chunk_shows_half_a_character(strategy, policy, pattern):
    ids = encode(CHARACTERS)
    chunks, request = chunks_of(ids, tokenizer(), strategy, policy, pattern)
    assert "".join(chunks) == request.text == CHARACTERS
    assert not any("\ufffd" in chunk for chunk in chunks)


@pytest.mark.parametrize(("strategy", "policy"), CASES)
def test_max_tokens_inside_a_character_gives_the_tail_of_decoding_the_tokens(strategy, policy):
    ids = encode(CHARACTERS)
    for max_tokens in range(1, 9):
        chunks, request = chunks_of(ids, tokenizer(), strategy, policy, "accept all", max_tokens=max_tokens)
        assert (request.token_ids, request.finish_reason) == (ids[:max_tokens], "length")
        assert "".join(chunks) == request.text == tokenizer().decode(ids[:max_tokens])
        assert not any("\ufffd" in chunk for chunk in chunks[:-1])


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize(("strategy", "policy"), CASES)
def test_an_id_beyond_the_tokenizer_is_no_text_and_the_text_goes_on(strategy, policy, pattern):
    """A16: the model's head is wider than the tokenizer, and picks such an id, also next to half a character."""
    text = encode("Hello 👍, world")
    for at in (0, len(encode("Hello ")) + 1, len(text)):
        ids = [*text[:at], VOCAB_SIZE + 3, *text[at:]]
        chunks, request = chunks_of(ids, tokenizer(), strategy, policy, pattern, logprobs=1)
        done = request.output().outputs[0]
        assert "".join(chunks) == done.text == "Hello 👍, world"
        assert (list(done.token_ids), done.finish_reason) == (ids, "length")
        assert done.logprobs[at][VOCAB_SIZE + 3].decoded_token == ""


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    pieces=texts(),
    strategy=st.sampled_from(STRATEGIES),
    policy=st.tuples(st.integers(1, 8), st.integers(1, 8), st.integers(1, 4)),
    pattern=st.sampled_from(list(PATTERNS)),
    keep=st.booleans(),
    data=st.data(),
)
def test_any_text_streams_as_it_is_up_to_the_first_stop_string(pieces, strategy, policy, pattern, keep, data):
    stops = data.draw(stop_strings(pieces))
    ids = list(range(len(pieces.pieces)))
    chunks, request = chunks_of(
        ids, pieces, strategy, policy, pattern, stop=stops, include_stop_str_in_output=keep
    )  # fmt: skip
    whole = pieces.decode(ids, skip_special_tokens=True)
    want, hit = cut_at_stop(whole, stops, keep)
    assert "".join(chunks) == request.text == want
    assert request.token_ids == ids[: len(request.token_ids)]
    assert "\ufffd" in want or not any("\ufffd" in chunk for chunk in chunks)
    if hit is None:
        assert (request.finish_reason, len(request.token_ids)) == ("length", len(ids))
    else:  # also where the last token ends on half a character, which holds the stop string back until then
        assert (request.finish_reason, request.stop_reason) == ("stop", hit)
