"""Writes token ids after given ones: what an author does, and Hugging Face's `generate` as one.

A task's tokens follow from its head and its SamplingParams alone, by the engine's own rule (`infer.sampler`): its token
at a position is the argmax of logits and noise that is keyed by seed and position. So they depend neither on the tasks
beside it nor on the author, but for the last bits of logits that differ with the batch's padding (in bf16 a near-tie
may fall either way; the engine's bits are the same in any batch). This file knows nothing of texts or rows.
"""

# Shape legend: B tasks of one batch, T tokens so far, V vocabulary

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from infer.params import SamplingParams
from infer.sampler import PickParams, pick
from train.prompts import Prompt


@dataclass(frozen=True, slots=True)
class Task:
    """Tokens to write.

    Args:
        prompt: whose row it is for; a task of a self-asked row has no messages there while it asks.
        head: token ids to write after, at least one.
        params: with max_tokens, and a seed.
    """

    prompt: Prompt
    head: list[int]
    params: SamplingParams


class Written(NamedTuple):
    """What became of a task."""

    task: Task
    token_ids: list[int]  # up to and with EOS; at most max_tokens
    error: str | None = None  # why it has failed; None if it hasn't


class Author(Protocol):
    @property
    def num_tasks(self) -> int:
        """Tasks that wait or run."""

    @property
    def max_model_len(self) -> int | None:
        """Most tokens of head and tail together."""

    def add(self, task: Task) -> None:
        """Take a task; ValueError if it can't be done."""

    def step(self) -> list[Written]:
        """Work on the tasks for a while; those that are done."""


class HuggingFaceAuthor:
    """The base model under transformers' `generate`: a step is one batch from its beginning to its end.

    Args:
        model: as `load_base` gives it; its generation_config is replaced.
        max_model_len: the base's positions, where it has a limit.
    """

    def __init__(self, model: Any, eos_token_ids: Sequence[int], max_model_len: int | None) -> None:
        from transformers import GenerationConfig
        from transformers.utils import logging

        self.model = model
        self.max_model_len = max_model_len
        self.eos_token_ids = list(eos_token_ids)
        self.pad = self.eos_token_ids[0] if self.eos_token_ids else 0
        # The base's own may hold a repetition penalty or a top-p, which is not the law that exits learn
        model.generation_config = GenerationConfig(
            do_sample=False, eos_token_id=self.eos_token_ids or None, pad_token_id=self.pad
        )
        # After the prompt, HF unembeds a strided slice: on CPU that copies the matrix for each row (5 s at B = 32)
        model.get_output_embeddings().register_forward_pre_hook(lambda _, args: (args[0].contiguous(),))
        logging.set_verbosity_error()  # generate repeats its advice at every call
        self._tasks: list[Task] = []

    @property
    def num_tasks(self) -> int:
        return len(self._tasks)

    def add(self, task: Task) -> None:
        self._tasks.append(task)

    def step(self) -> list[Written]:
        """All tasks of the commonest length, so that no question waits for answers' ends."""
        if not self._tasks:
            return []
        length = Counter(task.params.max_tokens for task in self._tasks).most_common(1)[0][0]
        batch = [task for task in self._tasks if task.params.max_tokens == length]
        self._tasks = [task for task in self._tasks if task.params.max_tokens != length]
        try:
            tails = self._continue(batch, length)
        except (RuntimeError, ValueError) as error:
            return [Written(task, [], f"{type(error).__name__}: {error}") for task in batch]
        return [Written(task, tail) for task, tail in zip(batch, tails, strict=True)]

    @torch.inference_mode()
    def _continue(self, tasks: Sequence[Task], max_new_tokens: int | None) -> list[list[int]]:
        longest = max(len(task.head) for task in tasks)
        padding = [longest - len(task.head) for task in tasks]
        token_ids = torch.tensor([[self.pad] * n + task.head for n, task in zip(padding, tasks)])
        mask = torch.tensor([[0] * n + [1] * len(task.head) for n, task in zip(padding, tasks)])
        params = [task.params for task in tasks]
        out = self.model.generate(
            token_ids.to(self.model.device),
            attention_mask=mask.to(self.model.device),
            max_new_tokens=max_new_tokens,
            logits_processor=[_Picked(params, padding, self.model.device)],
        )
        return [self._until_eos(row) for row in out[:, longest:].tolist()]

    def _until_eos(self, token_ids: list[int]) -> list[int]:
        ends = [n for n, token in enumerate(token_ids) if token in self.eos_token_ids]
        return token_ids[: ends[0] + 1] if ends else token_ids


class _Picked:
    """A logits processor that leaves each row nothing but the token that the engine would pick."""

    def __init__(self, params: Sequence[SamplingParams], padding: Sequence[int], device: torch.device) -> None:
        seeds = [p.seed for p in params if p.seed is not None]
        assert len(seeds) == len(params), params
        self.params = PickParams.of(params, seeds, [0] * len(params), device)
        self.padding = torch.tensor(padding, device=device)  # [B]
        self.rows = torch.arange(len(params), device=device)  # [B]

    def __call__(self, token_ids: Tensor, logits: Tensor) -> Tensor:
        """token_ids [B, T] with padding on the left, logits [B, V] → [B, V]."""
        picked = pick(logits, self.params.at(self.rows, token_ids.shape[1] - self.padding))
        if (picked < 0).any():
            raise RuntimeError("the base's logits hold NaN or infinity")
        return torch.full_like(logits, -torch.inf).scatter_(1, picked.unsqueeze(1), 0.0)
