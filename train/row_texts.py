"""From prompts to token ids and from written token ids to rows, alike for everyone who writes.

A row is written as readable `messages` when encoding them gives the model's very tokens again, else as `token_ids` with
a `loss_mask`. This file knows nothing of models, files or how tokens are sampled.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from train.chat import Encoded, encode_messages, open_user_turn, render
from train.formats import Encoder
from train.prompts import Prompt


class RowTexts:
    """The base's tokenizer and chat template, as `train generate` uses them.

    Args:
        encoder: what `fit` reads the rows with.
    """

    def __init__(self, encoder: Encoder) -> None:
        self.encoder = encoder
        self.tokenizer: Any = encoder.tokenizer
        self.eos_token_ids = encoder.eos_token_ids
        self.has_template = self.tokenizer.chat_template is not None

    def user_turn_ids(self, opening: str) -> list[int]:
        """What stands before the user's first word, and the words with which the turn begins."""
        return self._encode(open_user_turn(self.tokenizer) + opening)

    def question(self, opening: str, head: Sequence[int], tail: Sequence[int]) -> str:
        """The user's turn that `head` (see `user_turn_ids`) and the `tail` written after it make."""
        # Not the tail alone: some tokenizers drop a leading space
        before, whole = (self.tokenizer.decode(ids, skip_special_tokens=True) for ids in ([*head], [*head, *tail]))
        return (opening + whole[len(before) :]).strip()

    def prompt_ids(self, prompt: Prompt) -> list[int]:
        """What the answer is written after, as serving would give it.

        Raises:
            ValueError: the template refuses the messages.
        """
        if self.has_template:
            return self._encode(render(self.tokenizer, prompt.messages, open_answer=True))
        served = list(self.tokenizer(prompt.text)["input_ids"])  # as `infer` does it, with BOS where that puts one
        bos = self.tokenizer.bos_token_id
        return served or ([] if bos is None else [bos])

    def is_ended(self, tail: Sequence[int]) -> bool:
        """Whether the model ended its text itself."""
        return bool(tail) and tail[-1] in self.eos_token_ids

    def row(self, prompt: Prompt, head: Sequence[int], tail: Sequence[int]) -> dict[str, Any]:
        """The row to write: `messages` if they stand for exactly these tokens, else the tokens."""
        if self.has_template:
            ended = self.is_ended(tail)
            answer = self.tokenizer.decode(tail[:-1] if ended else tail)
            messages = [*prompt.messages, {"role": "assistant", "content": answer}]
            if self._stands_for(messages, ended, head, tail):
                return {"index": prompt.number, "messages": messages} | ({} if ended else {"complete": False})
        mask = [0] * len(head) + [1] * len(tail)
        return {"index": prompt.number, "token_ids": [*head, *tail], "loss_mask": mask}

    def digest_of(self, row: Mapping[str, Any]) -> bytes:
        """`digest` of the tokens that a written row stands for.

        Raises:
            ValueError: it is no row of ours.
        """
        token_ids, loss_mask = self.encoder(row)
        while loss_mask and not loss_mask[-1]:  # the template's, after the answer
            loss_mask = loss_mask[:-1]
        return digest(token_ids[: len(loss_mask)])

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _stands_for(self, messages: list[Any], ended: bool, head: Sequence[int], tail: Sequence[int]) -> bool:
        try:
            encoded = encode_messages(self.tokenizer, messages, self.eos_token_ids, complete=ended)
        except ValueError:
            return False
        n = len(head) + len(tail)  # the template may write a line break after the last EOS
        wanted = Encoded([*head, *tail], [False] * len(head) + [True] * len(tail))
        return encoded.clipped(n) == wanted and not any(encoded.loss_mask[n:])


def digest(token_ids: Sequence[int]) -> bytes:
    """Stands for a row's tokens: equal for equal ones, and 16 bytes where millions of rows are to be known."""
    return hashlib.blake2b(array("q", token_ids).tobytes(), digest_size=16).digest()
