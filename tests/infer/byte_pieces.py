"""Tokens that are any pieces of a text's UTF-8, and what a user must see of it: the reference for streamed text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hypothesis import strategies as st


@dataclass(frozen=True)
class Pieces:
    """A tokenizer with one token for each piece: id i is pieces[i], which may be empty or end inside of a character."""

    pieces: tuple[bytes, ...]

    def __call__(self, text: str, *, add_special_tokens: bool = True) -> dict[str, list[int]]:
        raise AssertionError("nothing is encoded here")

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        return b"".join(self.pieces[i] for i in token_ids).decode("utf-8", errors="replace")


@st.composite
def texts(draw: st.DrawFn, max_pieces: int = 40) -> Pieces:
    """Any text, or bytes that are none, cut anywhere: between characters, inside of them, twice at one place."""
    alphabet = st.sampled_from("abc é👍世\u200d\ufffd\n") | st.characters(codec="utf-8")
    raw = draw(st.text(alphabet, min_size=1, max_size=25).map(str.encode) | st.binary(min_size=1, max_size=25))
    cuts = sorted(draw(st.lists(st.integers(0, len(raw)), max_size=max_pieces - 1)))
    return Pieces(tuple(raw[a:b] for a, b in zip([0, *cuts], [*cuts, len(raw)])))


@st.composite
def stop_strings(draw: st.DrawFn, pieces: Pieces) -> list[str]:
    """Mostly parts of the text, so that they are found, overlap, and begin where nothing comes of it."""
    text = pieces.decode(list(range(len(pieces.pieces))), skip_special_tokens=True)
    part = st.tuples(st.integers(0, len(text) - 1), st.integers(1, 6)).map(lambda at: text[at[0] : at[0] + at[1]])
    return draw(
        st.lists(part | st.tuples(part, st.text("abé", max_size=2)).map("".join) | st.text("abé👍", min_size=1))
    )


def cut_at_stop(text: str, stops: Sequence[str], keep: bool) -> tuple[str, str | None]:
    """The text up to the stop string that is complete first, the longest one if several end together; and which."""
    for end in range(1, len(text) + 1):
        if ending := [stop for stop in stops if text[:end].endswith(stop)]:
            hit = max(ending, key=len)
            return text[: end if keep else end - len(hit)], hit
    return text, None
