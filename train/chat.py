"""Conversations and texts as token ids with a loss mask, through the base's own tokenizer and chat template.

Stock templates mark no assistant spans, so spans are found in rendered strings. An answer begins where the prompt ends
that serving renders for it (with the generation prompt), and ends where a rendering with the answer's content replaced
by a marker goes on after the marker. The whole is tokenised once, and a token that straddles the seam counts as answer.
This file knows nothing of files, batches or models.
"""

# Shape legend: T tokens of one row

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

MARKER = "\N{SYMBOL FOR SUBSTITUTE}hispec\N{SYMBOL FOR SUBSTITUTE}"

Message = Mapping[str, Any]


class Encoded(NamedTuple):
    """One row, ready for training."""

    token_ids: list[int]  # [T]
    loss_mask: list[bool]  # [T], True where the token was (or is to be) written by the target

    def clipped(self, max_length: int) -> Encoded:
        return Encoded(self.token_ids[:max_length], self.loss_mask[:max_length])

    @property
    def num_labels(self) -> int:
        """Tokens that something before them predicts."""
        return sum(self.loss_mask[1:])


def _check_messages(messages: Sequence[Message]) -> None:
    """Raise ValueError unless every message has a role and a text, and some assistant turn has words in it."""
    if not messages:
        raise ValueError("messages must be a non-empty list of {role, content}")
    for number, message in enumerate(messages):
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                kind = type(message.get(key)).__name__ if key in message else "nothing"
                raise ValueError(f"messages[{number}].{key} must be a text, got {kind}")
    if not any(m["role"] == "assistant" and m["content"].strip() for m in messages):
        raise ValueError("messages hold no assistant turn with text, so nothing carries loss")


def render(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], open_answer: bool = False) -> str:
    """The conversation as the template writes it; what the template refuses becomes a ValueError."""
    if tokenizer.chat_template is None:
        raise ValueError("the base has no chat template: give rows with `text`, or prompt and response, not messages")
    try:
        return tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=open_answer)
    except Exception as error:  # templates raise whatever they like
        raise ValueError(f"the chat template refuses the messages: {error}") from error


def open_user_turn(tokenizer: PreTrainedTokenizerBase) -> str:
    """What stands before the user's first word."""
    return render(tokenizer, [{"role": "user", "content": MARKER}]).partition(MARKER)[0]


def encode_messages(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], eos_token_ids: Sequence[int], complete: bool = True
) -> Encoded:
    """Assistant turns carry loss, the EOS that closes each included.

    A turn that the template writes otherwise once others follow (Qwen3 takes the reasoning out) carries none: the base
    never wrote it so.

    Args:
        complete: False for a last answer that was cut short: the row ends with its last token, without EOS.
    """
    _check_messages(messages)
    text = render(tokenizer, messages)
    answers = [n for n, m in enumerate(messages) if m["role"] == "assistant" and m["content"].strip()]
    spans = [span for n in answers if (span := _answer_span(tokenizer, messages, n, text)) is not None]
    if not spans:
        raise ValueError("the chat template rewrites every assistant turn once others follow: end the row with one")
    if not complete:
        text = text[: spans[-1][1]]
    encoded = _encode_spans(tokenizer, text, spans)
    _close_answers(encoded, eos_token_ids)
    return encoded


def encode_text(tokenizer: PreTrainedTokenizerBase, text: str, prompt: str = "", end: bool = False) -> Encoded:
    """A plain text: everything after BOS and after `prompt` carries loss; `end` closes it with EOS."""
    whole = prompt + text
    encoded = _encode_spans(tokenizer, whole, [(len(prompt), len(whole))])
    token_ids, mask = encoded
    bos = tokenizer.bos_token_id
    # tokenizers that add BOS themselves are known by what they do to nothing
    if bos is not None and bos in tokenizer("")["input_ids"] and token_ids[:1] != [bos]:
        token_ids, mask = [bos, *token_ids], [False, *mask]
    if end and tokenizer.eos_token_id is not None:
        token_ids, mask = [*token_ids, tokenizer.eos_token_id], [*mask, True]
    return Encoded(token_ids, mask)


def serving_prompt(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> str:
    """What serving gives to the base for the answer to `messages`; empty when nothing was asked."""
    return render(tokenizer, messages, open_answer=True) if messages else ""


def _answer_span(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], number: int, text: str
) -> tuple[int, int] | None:
    """Where in `text` the answer of turn `number` stands, [start, end) in characters; None if it stands rewritten."""
    turn, asked = messages[number], messages[:number]
    answered = text if number == len(messages) - 1 else render(tokenizer, messages[: number + 1])
    before, found, after = render(tokenizer, [*asked, {**turn, "content": MARKER}]).partition(MARKER)
    if not found:
        raise ValueError(f"the chat template drops messages[{number}], an assistant turn: nothing of it can carry loss")
    prompt = serving_prompt(tokenizer, asked)
    if not answered.startswith(prompt):
        if number < len(messages) - 1:
            return None
        raise ValueError(
            f"the chat template writes messages[{number}] otherwise than serving asks for it: the prompt there ends "
            f"{prompt[-40:]!r}. Let `python -m train generate` write the rows, which keeps the tokens"
        )
    # Without a prompt (a first turn of the assistant's) the answer begins where it parts from the marker's rendering
    start = len(prompt) if asked else _num_shared(answered, before)
    end = len(answered) - _num_shared(answered[start:][::-1], after[::-1])
    return (start, end) if text.startswith(answered[:end]) else None


def _num_shared(a: str, b: str) -> int:
    """How many characters two texts share at their beginning."""
    return next((n for n, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def _encode_spans(tokenizer: PreTrainedTokenizerBase, text: str, spans: Sequence[tuple[int, int]]) -> Encoded:
    """Tokens of `text` without added specials; a token carries loss if any of its characters lies in a span."""
    if not tokenizer.is_fast:
        raise ValueError(f"{type(tokenizer).__name__} gives no character offsets; use a base with a fast tokenizer")
    batch = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    offsets = batch["offset_mapping"]
    mask = []
    for n, (start, stop) in enumerate(offsets):
        # some tokenizers trim spaces off the offsets: give them back to the token before the gap
        stop = max(stop, offsets[n + 1][0] if n + 1 < len(offsets) else len(text))
        mask.append(any(start < end and stop > begin for begin, end in spans))
    return Encoded(list(batch["input_ids"]), mask)


def _close_answers(encoded: Encoded, eos_token_ids: Sequence[int]) -> None:
    """Let the EOS that follows an answer carry loss (in place): by its place, as pad often has the same id."""
    token_ids, mask = encoded
    for n in range(len(token_ids) - 1, 0, -1):
        if mask[n - 1] and not mask[n] and token_ids[n] in eos_token_ids:
            mask[n] = True
