import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from infer.detokenizer import Detokenizer
from infer.params import SamplingParams

TEXTS = [
    "Hello, world! The alphabet: ABCDEFGHIJKLMNOPQRSTUVWXYZ.",
    "👍 世界 삼겹살 👨‍👩‍👧‍👦 naïve café\n\n\tdef f(x):\n    return x + 1",
    "A \ufffd that the text really holds, and one at its end \ufffd",
]


@pytest.fixture(scope="module", params=["trained", pytest.param("real", marks=pytest.mark.real)])
def tokenizer(request):
    if request.param == "real":
        from train.base_model import EMBEDDED, load_tokenizer

        return load_tokenizer(EMBEDDED)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<eos>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(TEXTS[:1] * 5, trainer)
    return tokenizer


def encode(tokenizer, text: str) -> list[int]:
    ids = tokenizer.encode(text, add_special_tokens=False)
    return ids if isinstance(ids, list) else ids.ids


def stream(tokenizer, ids: list[int], every: int = 1, **params) -> tuple[list[str], Detokenizer, int]:
    """The pieces of text when `take` is called after every `every` tokens, and how many tokens were needed."""
    detokenizer, pieces, num_pushed = Detokenizer(tokenizer, SamplingParams(**params)), [], 0
    for token_id in ids:
        num_pushed += 1
        hit = detokenizer.push(token_id)
        if hit or num_pushed % every == 0:
            pieces.append(detokenizer.take())
        if hit:
            break
    pieces.append(detokenizer.finish())
    assert "".join(pieces) == detokenizer.text
    return pieces, detokenizer, num_pushed


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("every", [1, 2, 5, 1000])
def test_the_stream_is_the_text_and_shows_no_half_character(tokenizer, text, every):
    pieces, detokenizer, _ = stream(tokenizer, encode(tokenizer, text), every)
    assert detokenizer.text == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


@given(st.lists(st.integers(0, 290), max_size=40), st.booleans(), st.integers(1, 6))
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_tokens_give_the_text_of_decoding_them_at_once(tokenizer, ids, skip_special_tokens, every):
    _, detokenizer, _ = stream(tokenizer, ids, every, skip_special_tokens=skip_special_tokens)
    assert detokenizer.text == tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)


def test_random_ids_of_the_whole_vocabulary_give_the_text_of_decoding_them_at_once(tokenizer):
    size = len(tokenizer) if hasattr(tokenizer, "__len__") else tokenizer.get_vocab_size()
    rng = random.Random(0)
    for _ in range(30):
        ids = [rng.randrange(size) for _ in range(50)]
        _, detokenizer, _ = stream(tokenizer, ids)
        assert detokenizer.text == tokenizer.decode(ids, skip_special_tokens=True)


def test_an_id_beyond_the_tokenizer_is_no_text(tokenizer):
    ids = encode(tokenizer, "Hello, world")
    _, detokenizer, _ = stream(tokenizer, [*ids[:2], 10**6, *ids[2:]])
    assert detokenizer.text == "Hello, world"


def test_an_end_inside_a_character_has_a_defined_tail(tokenizer):
    ids = encode(tokenizer, "ok 👍")[:-1]
    pieces, detokenizer, _ = stream(tokenizer, ids)
    assert detokenizer.text == tokenizer.decode(ids, skip_special_tokens=True)
    assert "\ufffd" not in "".join(pieces[:-1]) and pieces[-1].endswith("\ufffd")


@pytest.mark.parametrize("every", [1, 2, 5])
def test_a_stop_string_split_over_tokens_leaves_no_trace(tokenizer, every):
    # Known failure D12: of the stop string DEFGHIJ, the pieces DEF, GH and I leaked into the stream.
    ids = encode(tokenizer, TEXTS[0])
    pieces, detokenizer, num_pushed = stream(tokenizer, ids, every, stop="DEFGHIJ")
    assert detokenizer.text == "".join(pieces) == "Hello, world! The alphabet: ABC"
    assert detokenizer.stop_string == "DEFGHIJ"
    text = tokenizer.decode(ids[:num_pushed], skip_special_tokens=True)
    assert "DEFGHIJ" in text and "DEFGHIJ" not in tokenizer.decode(ids[: num_pushed - 1], skip_special_tokens=True)


def test_a_stop_string_can_be_kept(tokenizer):
    _, detokenizer, _ = stream(tokenizer, encode(tokenizer, TEXTS[0]), stop="DEFGHIJ", include_stop_str_in_output=True)
    assert detokenizer.text == "Hello, world! The alphabet: ABCDEFGHIJ"


def test_a_stop_string_within_the_first_min_tokens_does_not_count(tokenizer):
    ids = encode(tokenizer, "a b a b a b")
    _, first, num_first = stream(tokenizer, ids, stop="b")
    _, later, num_later = stream(tokenizer, ids, stop="b", min_tokens=num_first)
    assert (first.text, later.text) == ("a ", "a b a ")
    assert num_later > num_first
    _, never, _ = stream(tokenizer, ids, stop="b", min_tokens=len(ids), max_tokens=None)
    assert never.text == "a b a b a b" and never.stop_string is None


def test_without_detokenize_there_is_no_text(tokenizer):
    ids = encode(tokenizer, TEXTS[0])
    pieces, detokenizer, num_pushed = stream(tokenizer, ids, detokenize=False)
    assert ("".join(pieces), num_pushed, detokenizer.text_of(ids[0])) == ("", len(ids), None)
    assert Detokenizer(tokenizer, SamplingParams()).text_of(ids[0]) == tokenizer.decode(ids[:1])


def test_the_beginning_of_a_stop_string_waits_and_is_released_when_it_goes_on_otherwise(tokenizer):
    detokenizer = Detokenizer(tokenizer, SamplingParams(stop="world?"))
    for token_id in encode(tokenizer, "Hello, world"):
        assert not detokenizer.push(token_id)
    assert detokenizer.take() == "Hello, "
    for token_id in encode(tokenizer, "! Bye w"):
        assert not detokenizer.push(token_id)
    assert detokenizer.take() == "world! Bye "
    assert (detokenizer.finish(), detokenizer.take()) == ("w", "")


@given(st.lists(st.text("abé", min_size=1, max_size=4), min_size=1, max_size=3), st.text("abé", max_size=20), st.data())
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_stop_string_that_is_complete_first_wins(tokenizer, stops, text, data):
    keep = data.draw(st.booleans())
    _, detokenizer, _ = stream(
        tokenizer, encode(tokenizer, text), data.draw(st.integers(1, 4)), stop=stops, include_stop_str_in_output=keep
    )
    expected, hit = text, None
    for end in range(1, len(text) + 1):
        if ending := [s for s in stops if text[:end].endswith(s)]:
            hit = max(ending, key=len)
            expected = text[:end] if keep else text[: end - len(hit)]
            break
    assert (detokenizer.text, detokenizer.stop_string) == (expected, hit)


def test_spaces_that_belong_to_the_token_before_survive():
    # Llama's style: the space stands in the token, and is dropped from the first token of whatever is decoded.
    tokenizer = Tokenizer(models.WordLevel({"▁Hello": 0, "▁world": 1, "!": 2, "▁": 3}, unk_token="!"))
    tokenizer.decoder = decoders.Metaspace()
    ids = [0, 1, 2, 1, 3, 1]
    _, detokenizer, _ = stream(tokenizer, ids)
    assert detokenizer.text == tokenizer.decode(ids) == "Hello world! world  world"


def test_pushing_after_a_stop_is_our_own_mistake(tokenizer):
    detokenizer = Detokenizer(tokenizer, SamplingParams(stop="H"))
    ids = encode(tokenizer, "Hello")
    assert detokenizer.push(ids[0])
    with pytest.raises(AssertionError):
        detokenizer.push(ids[0])
