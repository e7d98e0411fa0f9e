"""Any text, cut into any tokens, taken at any pace, with any stop strings: the stream is the text (D12, D13)."""

from hypothesis import example, given, settings
from hypothesis import strategies as st

from infer.detokenizer import Detokenizer
from infer.params import SamplingParams
from tests.infer.byte_pieces import Pieces, cut_at_stop, stop_strings, texts

THUMB = Pieces((b"ok ", b"\xf0", b"\x9f\x91", b"\x8d", b"", b"!"))


@settings(max_examples=400, deadline=None, derandomize=True)
@given(pieces=texts(), data=st.data(), keep=st.booleans())
def test_the_stream_is_the_text_up_to_the_first_stop_string(pieces, data, keep):
    stops = data.draw(stop_strings(pieces))
    ids = list(range(len(pieces.pieces)))
    takes = data.draw(st.lists(st.booleans(), min_size=len(ids), max_size=len(ids)))  # the ends of accepted blocks
    detokenizer = Detokenizer(pieces, SamplingParams(stop=stops, include_stop_str_in_output=keep))
    chunks, num_pushed = [], 0
    for token_id, is_end in zip(ids, takes, strict=True):
        num_pushed += 1
        is_hit = detokenizer.push(token_id)
        if is_hit or is_end:
            chunks.append(detokenizer.take())
        if is_hit:
            break
    chunks.append(detokenizer.finish())

    whole = pieces.decode(ids, skip_special_tokens=True)
    want, hit = cut_at_stop(whole, stops, keep)
    assert (detokenizer.text, detokenizer.stop_string) == (want, hit)
    assert "".join(chunks) == want
    # A token that ends on half a character waits for the rest of it, with all that it holds; no other token waits.
    ends = [pieces.decode(ids[: n + 1], skip_special_tokens=True) for n in range(num_pushed - 1)]
    assert not any(cut_at_stop(text, stops, keep)[1] for text in ends if not text.endswith("\ufffd"))
    assert hit is not None or num_pushed == len(ids)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(pieces=texts(), num_tokens=st.integers(0, 40))
@example(pieces=THUMB, num_tokens=2)
@example(pieces=THUMB, num_tokens=3)
@example(pieces=THUMB, num_tokens=5)
def test_half_a_character_is_shown_only_when_the_text_ends_in_it(pieces, num_tokens):
    """Whatever a chunk shows of the first tokens, the whole text goes on from there; the tail is that of the tokens."""
    ids = list(range(len(pieces.pieces)))[:num_tokens]
    detokenizer = Detokenizer(pieces, SamplingParams())
    shown, whole = "", pieces.decode(list(range(len(pieces.pieces))), skip_special_tokens=True)
    for token_id in ids:
        detokenizer.push(token_id)
        shown += detokenizer.take()
        assert whole.startswith(shown)
    assert shown + detokenizer.finish() == pieces.decode(ids, skip_special_tokens=True)
