"""A model's text on a terminal: without control characters, and in the colours of the tiers that picked its tokens."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

STYLES = {"ngram": "magenta underline", "draft": "green", "intermediate": "yellow", "target": ""}

# C0 without tab and newline, DEL, C1: an escape sequence could move the cursor, set the title or write the clipboard
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def printable(text: str) -> str:
    return _CONTROL.sub("\ufffd", text)


class Splitter:
    """Streamed text, cut into the shares of its tokens; the page's makeSplitter is the same in JavaScript.

    A token's own text can differ from its share of the whole text, where a character is split over tokens or a space is
    left out: such tokens get what stands before the next one that can be found.
    """

    def __init__(self) -> None:
        self._rest = ""
        self._queue: list[Mapping[str, str]] = []  # tokens without their text yet: {"text": …, "tier": …}

    def split(self, text: str, tokens: Iterable[Mapping[str, str]], is_last: bool) -> list[tuple[str, str]]:
        """(text, tier) of what can be told now; all that is left once it is the last."""
        self._rest += text
        self._queue += tokens
        parts: list[tuple[str, str]] = []
        while self._rest and self._queue:
            first = self._queue[0]
            if not first["text"]:
                self._queue.pop(0)
                continue
            at = -1 if "\ufffd" in first["text"] else self._rest.find(first["text"])
            if at in (0, 1):
                parts.append(self._give(at + len(first["text"]), first["tier"]))
                self._queue.pop(0)
                continue
            if first["text"].startswith(self._rest) and not is_last:
                break
            following = [i for i, t in enumerate(self._queue) if i and t["text"] and "\ufffd" not in t["text"]]
            end = self._rest.find(self._queue[following[0]]["text"]) if following else -1
            parts.append(self._give(end if end >= 0 else len(self._rest), first["tier"]))
            del self._queue[: following[0] if following else len(self._queue)]
        if is_last:
            parts.append(self._give(len(self._rest), "target"))
        return [part for part in parts if part[0]]

    def _give(self, length: int, tier: str) -> tuple[str, str]:
        given, self._rest = self._rest[:length], self._rest[length:]
        return given, tier
