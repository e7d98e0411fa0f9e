"""The loop of `train generate`: prompts become an author's tasks, tasks become rows, and every row is accounted for.

The author is kept full: as soon as a task ends, another begins. A self-asked row is two tasks, its question and then
its answer. This file knows nothing of files, nor of who the author is.
"""

from __future__ import annotations

import hashlib
import sys
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from infer.params import SamplingParams
from train.author import Author, Task, Written
from train.generate_options import GenerateOptions
from train.prompts import Prompt
from train.row_texts import RowTexts, digest

_QUESTION_TEMPERATURE = 1.0
_NUM_REASONS = 5  # that a report tells, the commonest


@dataclass
class Counts:
    """written + failed + skipped = asked, once all is done; `before` of the written ones stood in the file already."""

    asked: int = 0
    before: int = 0
    written: int = 0
    tokens: int = 0
    failures: Counter[str] = field(default_factory=Counter)  # by reason
    skips: Counter[str] = field(default_factory=Counter)

    @property
    def failed(self) -> int:
        return self.failures.total()

    @property
    def skipped(self) -> int:
        return self.skips.total()

    def __str__(self) -> str:
        return (
            f"asked {self.asked}: written {self.written} ({self.before} of them before), "
            f"failed {self.failed}{_reasons(self.failures)}, skipped {self.skipped}{_reasons(self.skips)}; "
            f"{self.tokens} new tokens"
        )


def _reasons(counter: Counter[str]) -> str:
    told = [f"{count} {reason}" for reason, count in counter.most_common(_NUM_REASONS)]
    rest = counter.total() - sum(count for _, count in counter.most_common(_NUM_REASONS))
    told += [f"{rest} for other reasons"] if rest else []
    return f" ({', '.join(told)})" if told else ""


class _Skipped(Exception):
    """Nothing is wrong, but this row is of no use."""


class Writing:
    """One run.

    Args:
        seen: digests of the rows that the file holds; those that are written join them.
    """

    def __init__(self, options: GenerateOptions, texts: RowTexts, author: Author, seen: set[bytes]) -> None:
        self.options = options
        self.texts = texts
        self.author = author
        self.seen = seen
        self.counts = Counts()

    def rows(self, prompts: Sequence[Prompt]) -> Iterator[list[dict[str, Any]]]:
        """The rows of `prompts` as they end, those of one step of the author's together."""
        waiting = deque(prompts)
        while waiting or self.author.num_tasks:
            while waiting and self.author.num_tasks < self.options.batch_size:
                prompt = waiting.popleft()
                with self._counted(prompt.number):
                    self._begin(prompt)
            ended: list[dict[str, Any]] = []
            for written in self.author.step():
                with self._counted(written.task.prompt.number):
                    ended += self._settle(written)
            yield ended

    @contextmanager
    def _counted(self, number: int) -> Iterator[None]:
        """What is raised inside is what becomes of row `number`."""
        try:
            yield
        except _Skipped as skip:
            self.counts.skips[str(skip)] += 1
        except (RuntimeError, ValueError) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            if reason not in self.counts.failures:
                print(f"warning: row {number} failed: {reason}", file=sys.stderr)
            self.counts.failures[reason] += 1

    def _asks(self, prompt: Prompt) -> bool:
        return self.texts.has_template and not prompt.messages

    def _begin(self, prompt: Prompt) -> None:
        if self._asks(prompt):
            head = self.texts.user_turn_ids(prompt.text)
            self._add(prompt, head, self.options.max_question_tokens, _QUESTION_TEMPERATURE)
        else:
            self._ask(prompt)

    def _ask(self, prompt: Prompt) -> None:
        head = self.texts.prompt_ids(prompt)
        if not head:
            raise _Skipped("without a prompt (and the tokenizer has no BOS)")
        if len(head) > self.options.max_prompt_tokens:
            raise _Skipped("with a prompt above --max_prompt_tokens")
        self._add(prompt, head, self.options.max_new_tokens, self.options.temperature(prompt.number))

    def _add(self, prompt: Prompt, head: list[int], max_tokens: int, temperature: float) -> None:
        room = self.author.max_model_len
        if room is not None and len(head) + max_tokens > room:
            raise _Skipped(f"with a prompt that leaves no room for {max_tokens} tokens among {room}")
        seed = _seed_of(self.options.seed, prompt.number, self._asks(prompt))
        params = SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=seed, detokenize=False)
        self.author.add(Task(prompt, head, params))

    def _settle(self, written: Written) -> list[dict[str, Any]]:
        """The row that came of a task; none as yet where it was the question."""
        (prompt, head), tail = (written.task.prompt, written.task.head), written.token_ids
        if written.error is not None:
            raise RuntimeError(written.error)
        if self._asks(prompt):
            if not self.texts.is_ended(tail):
                raise _Skipped("with a question above --max_question_tokens")
            question = self.texts.question(prompt.text, head, tail)
            if not question:
                raise _Skipped("with an empty question")
            self._ask(prompt._replace(messages=({"role": "user", "content": question},)))
            return []
        if not tail or (len(tail) == 1 and self.texts.is_ended(tail)):
            raise _Skipped("with an empty answer")
        row, tokens = self.texts.row(prompt, head, tail), digest([*head, *tail])
        if tokens in self.seen:
            raise _Skipped("equal to an earlier row")
        self.seen.add(tokens)
        self.counts.written += 1
        self.counts.tokens += len(tail)
        return [row]


def _seed_of(seed: int, number: int, is_question: bool) -> int:
    """A row's own, 64 bits; its question has another than its answer, as the noise is keyed by position too."""
    told = f"{seed} {number} {'question' if is_question else 'answer'}"
    return int.from_bytes(hashlib.blake2b(told.encode(), digest_size=8).digest(), "big")
