"""What a prompt may be, the token ids that it stands for, and its sampling parameters. Knows a tokenizer, nothing of
requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from infer.params import SamplingParams

Prompt = str | Sequence[int] | Mapping[str, Any]


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """The prompts, of which there may be one alone."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    listed = list(cast(Sequence[Any], prompts))
    if listed and isinstance(listed[0], int):
        return [cast(Prompt, listed)]
    return listed


def params_of_each(
    prompts: Sequence[Prompt], sampling_params: SamplingParams | Sequence[SamplingParams] | None
) -> list[SamplingParams]:
    """One for each prompt. ValueError when there are fewer or more."""
    params = sampling_params if sampling_params is not None else SamplingParams()
    each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
    if len(each) != len(prompts):
        raise ValueError(f"{len(each)} sampling_params for {len(prompts)} prompts: give one, or one for each")
    return each


def encode(prompt: Prompt, number: int, tokenizer: Any, vocab_size: int) -> tuple[str | None, list[int]]:
    """The prompt's text, None if it came as ids, and its token ids.

    Raises:
        ValueError: it has no tokens, or ids that are none; the prompt is called `number` there.
    """
    text: str | None = None
    if isinstance(prompt, Mapping):
        if "prompt_token_ids" not in prompt:
            raise ValueError(f"prompt {number}: a mapping must have 'prompt_token_ids', got {sorted(prompt)}")
        prompt = prompt["prompt_token_ids"]
    if isinstance(prompt, str):
        text = prompt
        ids = list(tokenizer(prompt)["input_ids"])
    else:
        ids = list(cast(Sequence[int], prompt))
    if not ids:
        raise ValueError(f"prompt {number} is empty ({prompt!r} has no tokens): give at least one token")
    for token_id in ids:
        if not isinstance(token_id, int) or isinstance(token_id, bool) or not 0 <= token_id < vocab_size:
            raise ValueError(
                f"prompt {number}: {token_id!r} is no token id; ids are whole numbers in 0..{vocab_size - 1}"
            )
    return text, ids
