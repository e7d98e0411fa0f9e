"""Text out of tokens, one token at a time, for one request. Knows strings; neither rows, nor ids that end a request.

    text   [0, taken)              handed out by `take`
           [taken, len - held)     ready to be handed out
           [len - held, len)       could be the beginning of a stop string: waits
    tokens that do not yet end on a whole character are not in `text` at all

Without stop strings nothing hangs on the text, and tokens wait until somebody takes it.

So what `take` and `finish` return, joined, is the final `text`, whatever the pace at which tokens came.
"""

import logging
from typing import Protocol

from infer.params import SamplingParams
from infer.tokenizer import NoTokenizer

logger = logging.getLogger(__name__)

_HALF_A_CHARACTER = "\ufffd"  # what tokenizers decode an incomplete UTF-8 sequence to


class TokenDecoder(Protocol):
    """A Hugging Face tokenizer (with `clean_up_tokenization_spaces` off), or one of the `tokenizers` library."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str: ...


class Detokenizer:
    def __init__(self, tokenizer: TokenDecoder, params: SamplingParams) -> None:
        self.text = ""
        self.stop_string: str | None = None  # the stop string that was hit
        self._tokenizer = tokenizer if params.detokenize else NoTokenizer()
        self._params = params
        self._num_pushed = 0
        self._stops = tuple(params.stop or ())
        self._num_taken = 0  # characters of text
        # [0, num_read) are in text already and give the decoder its left context; [num_read, len) are not
        self._window: list[int] = []
        self._num_read = 0

    def push(self, token_id: int) -> bool:
        """Add a token. True if it completed a stop string: the text ends here, the token still counts as generated."""
        assert self.stop_string is None, f"token {token_id} pushed after stop string {self.stop_string!r}"
        self._num_pushed += 1
        if not self._params.detokenize:
            return False
        self._window.append(token_id)
        return bool(self._stops) and self._read()

    def _read(self) -> bool:
        """Decode what has come, as far as it ends on a whole character; whether that completed a stop string."""
        new_text = self._unread_text()
        if not new_text or new_text.endswith(_HALF_A_CHARACTER):
            return False
        self._window = self._window[self._num_read :]
        self._num_read = len(self._window)
        return self._append(new_text)

    def take(self) -> str:
        """The text that is new since the last call and can no longer change."""
        if not self._stops and len(self._window) > self._num_read:
            self._read()
        end = len(self.text) - self._num_held()
        new, self._num_taken = self.text[self._num_taken : end], end  # end never falls: see `_num_held`
        return new

    def finish(self) -> str:
        """No more tokens come: the rest of the text, half a character included."""
        if self.stop_string is None:
            self._append(self._unread_text())
            self._num_read = len(self._window)
        new, self._num_taken = self.text[self._num_taken :], len(self.text)
        return new

    def text_of(self, token_id: int) -> str | None:
        """The text of a token by itself, special or not; it leaves no trace.

        None without detokenize, and for an id that the tokenizer refuses: any of the model's may be a probable one.
        """
        if not self._params.detokenize:
            return None
        try:
            return self._tokenizer.decode([token_id], skip_special_tokens=False)
        except Exception as error:  # tokenizers raise what they like
            logger.warning("token %d has no text: %s", token_id, error)
            return None

    def _unread_text(self) -> str:
        # A token's text can depend on the token before it (a space, a split character), so a window is decoded with and
        # without the new tokens, and the difference is theirs. The window is a few tokens, never the whole text.
        skip = self._params.skip_special_tokens
        read = self._tokenizer.decode(self._window[: self._num_read], skip_special_tokens=skip)
        return self._tokenizer.decode(self._window, skip_special_tokens=skip)[len(read) :]

    def _append(self, new_text: str) -> bool:
        """Add text and cut it at the stop string that is complete first, the longest one if several end together."""
        num_old = len(self.text)
        self.text += new_text
        if self._num_pushed <= self._params.min_tokens:  # as with stop tokens, the next one may be the first to end it
            return False
        matches = []
        for stop in self._stops:
            start = self.text.find(stop, max(0, num_old - len(stop) + 1))  # earlier ones would have been found earlier
            if start >= 0:
                matches.append((start + len(stop), start, stop))
        if not matches:
            return False
        end, start, self.stop_string = min(matches)
        self.text = self.text[: end if self._params.include_stop_str_in_output else start]
        return True

    def _num_held(self) -> int:
        """Length of the longest end of the text that a stop string begins with. It grows at most as the text does."""
        if self.stop_string is not None or self._params.include_stop_str_in_output:
            return 0
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        for length in range(min(longest, len(self.text)), 0, -1):
            if self.text.endswith(tuple(stop[:length] for stop in self._stops if len(stop) > length)):
                return length
        return 0
