"""What is looked at before any step of training: masks, cuts, and prompts as serving gives them.

Every chat row is compared with what serving does: each run of labels must begin where the prompt ends that `infer`
would give to the base, token for token, and must decode to the assistant's text. That needs nothing of `train.chat`'s
search for spans, so it catches that search's mistakes too. This file knows nothing of files or Lightning.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rich.console import Console
from rich.text import Text

from train.chat import Encoded, Message
from train.formats import Encoder

_SAMPLE_TOKENS = 400  # of the printed sample


class Answers(NamedTuple):
    """The assistant's turns of one row."""

    num_turns: int = 0
    num_rewritten: int = 0  # carry no loss, as the template writes them otherwise once others follow
    num_merged: int = 0  # begin with a token over the seam: serving cuts prompt and answer elsewhere


@dataclass
class Lint:
    """Counts over the rows of one kind (training, held-out); those below `num_cut` are of rows that are used."""

    kind: str
    num_rows: int
    max_length: int
    bad: list[str] = field(default_factory=list)  # source, place and reason
    num_unlabelled: int = 0
    num_labels_cut: int = 0
    num_cut: int = 0
    num_tokens: int = 0
    num_labels: int = 0
    num_all_labels: int = 0  # rows whose every token carries loss
    num_ended: int = 0  # stretches of labels that end with EOS
    longest: int = 0  # tokens
    answers: Answers = field(default_factory=Answers)

    def add(self, whole: Encoded, clipped: Encoded, answers: Answers, eos_token_ids: Sequence[int]) -> None:
        """Count one row, as it was and cut at `max_length`."""
        self.num_cut += len(clipped.token_ids) < len(whole.token_ids)
        self.num_labels_cut += whole.num_labels - clipped.num_labels
        if not clipped.num_labels:
            self.num_unlabelled += 1
            return
        self.longest = max(self.longest, len(clipped.token_ids))
        self.num_tokens += len(clipped.token_ids)
        self.num_labels += clipped.num_labels
        self.num_all_labels += all(clipped.loss_mask[1:])
        self.num_ended += sum(clipped.token_ids[stop - 1] in eos_token_ids for _, stop in label_runs(clipped))
        self.answers = Answers(*(a + b for a, b in zip(self.answers, answers)))

    @property
    def num_used(self) -> int:
        return self.num_rows - len(self.bad) - self.num_unlabelled

    def __str__(self) -> str:
        share = self.num_labels / max(1, self.num_tokens)
        return (
            f"{self.kind}: {self.num_rows} rows, {self.num_used} used, {len(self.bad)} bad, {self.num_unlabelled} "
            f"without a label, {self.num_cut} cut at {self.max_length} tokens ({self.num_labels_cut} labels lost); "
            f"{self.num_tokens} tokens, {share:.0%} carry loss"
        )

    def notes(self) -> list[str]:
        """What is no mistake by itself, but seldom meant."""
        turns, rewritten, merged = self.answers
        told = []
        if self.num_labels_cut > 0.1 * (self.num_labels + self.num_labels_cut):
            told.append(f"data.max_length={self.max_length} cuts away {self.num_labels_cut} labels; raise it")
        if self.num_all_labels:
            told.append(f"in {self.num_all_labels} rows every token carries loss: right for `text`, not for prompts")
        if rewritten:
            told.append(
                f"{rewritten} of {turns} assistant turns carry no loss: the chat template writes them otherwise once "
                "others follow; give each as the last turn of a row of its own"
            )
        if merged:
            told.append(f"{merged} of {turns} answers begin with a token that prompt and answer share; it carries loss")
        if turns and not self.num_ended:
            told.append(
                "no answer ends with an id that ends a text (eos_token_id of generation_config.json): nothing here "
                "teaches the exits to stop"
            )
        return told


def label_runs(encoded: Encoded) -> list[tuple[int, int]]:
    """The stretches [start, stop) of tokens that carry loss."""
    mask = [False, *encoded.loss_mask, False]
    edges = [n for n in range(len(mask) - 1) if mask[n] != mask[n + 1]]
    return list(zip(edges[::2], edges[1::2]))


def check_row(encoder: Encoder, content: Any, encoded: Encoded) -> Answers:
    """Compare a row's mask with serving's prompts and with the assistant's text; ValueError where they differ."""
    messages = encoder.messages(content)
    runs = label_runs(encoded)
    if messages is None:
        if content.get("token_ids") is not None or content.get("prompt") is None:
            return Answers()
        served = list(encoder.tokenizer(content["prompt"])["input_ids"])
        return Answers(1, 0, int(not _begins_as_served(encoder, encoded.token_ids, runs[0][0], served)))
    turns = [n for n, m in enumerate(messages) if m["role"] == "assistant" and m["content"].strip()]
    num_rewritten = num_merged = 0
    for n in turns:
        try:
            if not runs:
                raise ValueError(f"messages[{n}], an assistant turn, carries no loss")
            num_merged += not _check_answer(encoder, messages, n, encoded.token_ids, runs[0])
            runs = runs[1:]
        except ValueError:
            if n == turns[-1]:
                raise
            num_rewritten += 1  # a run that should have been this turn's is no other's either, and is told below
    if runs:
        start, stop = runs[0]
        raise ValueError(f"{_decode(encoder, encoded.token_ids[start:stop])!r} carries loss and is no assistant's turn")
    return Answers(len(turns), num_rewritten, num_merged)


def _check_answer(
    encoder: Encoder, messages: Sequence[Message], number: int, token_ids: Sequence[int], run: tuple[int, int]
) -> bool:
    """Whether the run is turn `number`'s and begins token for token where serving begins; ValueError if not its."""
    start, stop = run
    is_exact = True
    if number:  # a first turn of the assistant's answers nothing
        asked = list(messages[:number])
        served = encoder.tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=False)
        is_exact = _begins_as_served(encoder, token_ids, start, list(served))
    while stop > start and token_ids[stop - 1] in encoder.eos_token_ids:
        stop -= 1
    said, meant = _decode(encoder, token_ids[start:stop]), messages[number]["content"]
    # a template may write more than the content (an empty thought before it), or less (a thought taken out)
    if not (_letters(said).endswith(_letters(meant)) or _letters(meant).endswith(_letters(said))):
        raise ValueError(f"the labels of messages[{number}] decode to {said[-80:]!r}, its content is {meant[-80:]!r}")
    return is_exact


def _begins_as_served(encoder: Encoder, token_ids: Sequence[int], start: int, served: list[int]) -> bool:
    """True: the tokens before `start` are serving's prompt. False: the same text, cut otherwise at the seam."""
    if list(token_ids[:start]) == served:
        return True
    before, through, prompt = (_decode(encoder, ids) for ids in (token_ids[:start], token_ids[: start + 1], served))
    # a token over the seam holds something of both sides, and may begin inside a character
    if prompt.startswith(before.rstrip("\ufffd")) and through.startswith(prompt) and through != prompt:
        return False
    raise ValueError(
        f"serving's prompt and the row differ before the answer: {prompt[-60:]!r} there, {before[-60:]!r} here "
        f"({len(served)} and {start} tokens)"
    )


def _decode(encoder: Encoder, token_ids: Sequence[int]) -> str:
    return encoder.tokenizer.decode(list(token_ids), clean_up_tokenization_spaces=False)


def _letters(text: str) -> str:
    """Templates trim spaces, and tokenizers normalise characters."""
    return "".join(unicodedata.normalize("NFKC", text).split())


def show_counts(console: Console, lints: Sequence[Lint], num_bad: int | None = None) -> None:
    """Print counts, bad rows (the first `num_bad`, or all) and notes."""
    for lint in lints:
        console.print(Text(str(lint)))
        for problem in lint.bad[:num_bad]:
            console.print(Text(f"  bad: {problem}", style="red"))
        if len(lint.bad) > len(lint.bad[:num_bad]):
            console.print(Text(f"  … {len(lint.bad)} in all; `python -m train lint` lists them", style="red"))
        for note in lint.notes():
            console.print(Text(f"  note: {note}", style="yellow"))


def show_row(console: Console, encoder: Encoder, sample: Encoded) -> None:
    """Print one row, in green what carries loss."""
    console.print(Text.assemble("one row, as the base reads it; what carries loss is ", ("⟦green⟧", "green"), ":"))
    console.print(colored(encoder, sample))


def colored(encoder: Encoder, row: Encoded) -> Text:
    """The row's text; in brackets and green what carries loss, so that it shows without colours too."""
    shown = row.clipped(_SAMPLE_TOKENS)
    text, at = Text(), 0
    for start, stop in [*label_runs(shown), (len(shown.token_ids), len(shown.token_ids))]:
        text.append(_decode(encoder, shown.token_ids[at:start]), "dim")
        if stop > start:
            text.append(f"⟦{_decode(encoder, shown.token_ids[start:stop])}⟧", "green")
        at = stop
    return text.append("…" if len(shown.token_ids) < len(row.token_ids) else "", "dim")
