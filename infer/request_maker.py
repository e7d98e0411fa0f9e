"""Prompts and conversations as the engine's requests: tokens, limits, seeds, rules. Runs nothing."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from infer.detokenizer import Detokenizer
from infer.grammar import GrammarCompiler
from infer.inputs import Prompt, encode
from infer.logprobs import ScoreLog
from infer.manifest import Manifest
from infer.params import SamplingParams
from infer.processors import Rules
from infer.request import Request

Messages = Sequence[Mapping[str, Any]]


class RequestMaker:
    """
    Args:
        seed: draws the seeds of requests that bring none; None draws them from the system.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, manifest: Manifest, seed: int | None) -> None:
        self._tokenizer, self._manifest = tokenizer, manifest
        self._grammars = GrammarCompiler(tokenizer, manifest.base.vocab_size, manifest.eos_token_ids)
        self._numbers = itertools.count()
        self._seeds = random.Random(seed) if seed is not None else random.SystemRandom()

    def chat_prompt(self, messages: Messages, tools: Sequence[Mapping[str, Any]] | None = None) -> list[int]:
        """Token ids of a conversation, up to where the assistant's turn begins.

        Raises:
            ValueError: there is no template, or it refuses these messages or knows no tools.
        """
        name = self._manifest.base.name
        if not messages:
            raise ValueError("messages is empty: give at least one message, e.g. {'role': 'user', 'content': 'Hello'}")
        if not self._tokenizer.chat_template:
            raise ValueError(f"{name!r} has no chat template, so it can't chat: use generate() with a text prompt")
        listed = [dict(tool) for tool in tools or ()] or None
        if listed and not re.search(r"\btools\b", self._tokenizer.get_chat_template(tools=listed)):
            raise ValueError(f"tools: the chat template of {name!r} knows none: leave them out")
        try:
            ids = self._tokenizer.apply_chat_template(
                list(messages), tools=listed, add_generation_prompt=True, return_dict=False
            )
        except Exception as error:  # a template is a program that comes with the model, and raises what it likes
            raise ValueError(f"messages: the model's chat template can't render them: {error}") from error
        return list(ids)

    def make(
        self, prompt: Prompt, params: SamplingParams, request_id: str | None, number: int, judge_names: tuple[str, ...]
    ) -> Request:
        """The engine's record of a prompt.

        Raises:
            ValueError: the prompt is empty or too long (it is called `number` there), or what `params` want can't be
                done by this model.
        """
        base, eos_token_ids = self._manifest.base, self._manifest.eos_token_ids
        text, ids = encode(prompt, number, self._tokenizer, base.vocab_size)
        params.check_vocabulary(base.vocab_size)
        longest = self._manifest.limits.max_model_len
        if len(ids) >= longest:
            raise ValueError(
                f"prompt {number} has {len(ids)} tokens, which leaves no room for an answer: "
                f"max_model_len is {longest}; shorten the prompt, or export with a larger --max-model-len"
            )
        wanted = params.structured_outputs
        grammar = None if wanted is None else self._grammars.compile(wanted)
        limit = longest if params.max_tokens is None else min(longest, len(ids) + params.max_tokens)
        eos = frozenset(() if params.ignore_eos else eos_token_ids)
        request = Request(
            request_id=str(next(self._numbers)) if request_id is None else request_id,
            prompt=text,
            prompt_token_ids=tuple(ids),
            params=params,
            seed=self._seeds.getrandbits(63) if params.seed is None else params.seed,
            max_len=limit,
            stop_token_ids=eos | frozenset(params.stop_token_ids or ()),
            eos_token_ids=eos,
            detokenizer=Detokenizer(self._tokenizer, params),
            rules=Rules.of(params, len(ids), eos_token_ids, self._tokenizer, grammar),
            scores=ScoreLog.of(params.logprobs, params.prompt_logprobs),
            judge_names=judge_names,
        )
        for _ in range(1, params.n):
            request.add_choice(Detokenizer(self._tokenizer, params))
        return request
