"""The second gate: the tokens that the finished artifact serves, through the whole runtime.

Every strategy that its exits allow must give plain decoding's greedy tokens, and in fp32 plain decoding must give those
of Hugging Face's forward. Programs may pass the first gate (`parity`) and still be put together wrongly: positions,
pages, trimmed vocabularies, contexts and chunks of prompts meet only here.
"""

# Shape legend: N tokens generated, V vocabulary

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from export.parity import MAX_ERROR, ParityError
from infer.artifact import Artifact
from infer.llm import LLM
from infer.manifest import BuildInfo, Manifest
from infer.output import check_whole
from infer.params import SamplingParams
from infer.stage import num_scratch_blocks
from infer.strategy import Policy, stages_of

NUM_TOKENS = 24
LONG = 323  # tokens
PLAIN = "autoregressive"


class Oracle:
    """What Hugging Face's own forward would have picked after a prompt and after each token of an answer to it.

    Asked about answers that are there: while their tokens are the forward's picks, they are its greedy texts. Not
    `generate`, as what a generation_config asks for (penalties, forced tokens) is no part of plain decoding.
    """

    def __init__(self, load: Callable[[], PreTrainedModel]) -> None:
        """load: the base in float32 with a stock attention; called when there is a new answer, and not kept."""
        self._load = load
        self._known: dict[tuple[tuple[int, ...], tuple[int, ...]], Tensor] = {}

    @torch.no_grad()
    def learn(self, prompts: Sequence[list[int]], answers: Sequence[list[int]]) -> None:
        """Run the forward over prompts with their answers."""
        keys = [(tuple(prompt), tuple(answer)) for prompt, answer in zip(prompts, answers, strict=True)]
        if not (new := [key for key in keys if key not in self._known]):
            return
        base = self._load()
        for prompt, answer in new:
            ids = torch.tensor([prompt + answer[:-1]], device=base.device)
            self._known[prompt, answer] = base(ids, use_cache=False).logits[0, len(prompt) - 1 :].float().cpu()

    def logits(self, prompt: list[int], answer: list[int]) -> Tensor:
        """[N, V] float32: from which each of the N tokens of an answer, learnt before, would be picked."""
        return self._known[tuple(prompt), tuple(answer)]

    def gap(self, prompt: list[int], answer: list[int], place: int, token_ids: Sequence[int]) -> float:
        """At `place`, from the largest logit to the lowest of these tokens', relative to the largest in magnitude."""
        logits = self.logits(prompt, answer)[place]
        return float((logits.max() - logits[list(token_ids)].min()) / logits.abs().max())


@dataclass(frozen=True, kw_only=True)
class ServedTokens:
    """One set of programs through the runtime."""

    strategies: list[str]
    num_prompts: int
    num_tokens: int  # of one strategy, all prompts together
    num_equal: dict[str, int]  # strategy → texts that are plain decoding's
    num_equal_to_transformers: int | None  # texts; None: not compared, as the dtype's own rounding decides
    num_ties: int  # further texts, which leave theirs where two logits lie within the programs' error


def calibration_prompts(rows: Sequence[Tensor], manifest: Manifest) -> list[list[int]]:
    """A single token, prompts that end before, on and behind a block's edge, one that takes two chunks, and one of so
    many cached positions that kernels take their sums in pieces."""
    size, limits = manifest.block_size, manifest.limits
    text = torch.cat(list(rows)).tolist()
    lengths = [1, size - 1, size + 1, 2 * size, limits.prefill_chunk + size, LONG]
    while len(text) <= max(lengths) + size:
        text += text
    longest = max(1, min(limits.max_model_len // 2, limits.max_model_len - NUM_TOKENS))
    distinct = dict.fromkeys(min(n, longest) for n in lengths)
    return [text[start : start + max(1, n)] for start, n in enumerate(distinct)]


def check(
    artifact: Artifact,
    build: BuildInfo,
    programs: Mapping[str, Callable[..., Any]],
    prompts: Sequence[list[int]],
    oracle: Oracle | None,
) -> ServedTokens:
    """Decode `prompts` by every strategy; ParityError where a token is not the one that it must be.

    Args:
        artifact: with a record of these programs' files at least.
        build, programs: what to run, loaded before.
        oracle: None: Hugging Face is not asked.
    """
    manifest = artifact.manifest
    size, policy = manifest.block_size, Policy()
    num_scratch = 0
    with suppress(ValueError):  # where its calls would be too wide it is not tried
        num_scratch = num_scratch_blocks(stages_of("lookahead", policy, manifest), size)
    llm = LLM(
        artifact,
        PLAIN,
        backend=build.backend,
        dtype=build.dtype,
        device=build.device,
        num_blocks=2 + sum(1 + (len(p) + NUM_TOKENS) // size + num_scratch for p in prompts),
        max_num_seqs=len(prompts),
        enforce_eager=True,
        programs=programs,
    )
    params = [
        SamplingParams(
            temperature=0, max_tokens=min(NUM_TOKENS, manifest.limits.max_model_len - len(p)), ignore_eos=True,
            detokenize=False,
        )
        for p in prompts
    ]  # fmt: skip
    names = llm.supported(policy)
    served = {}
    for name in names:
        llm.use(name)
        outputs = llm.generate(list(prompts), params)
        check_whole(outputs)
        served[name] = [list(output.outputs[0].token_ids) for output in outputs]
    where = f"{build.backend} {build.dtype}"
    if oracle is not None:
        oracle.learn(prompts, served[PLAIN])
    is_promised = all(info.bitwise_range for info in build.programs.values())
    for name, texts in served.items():
        _same(f"{where}: {name}", prompts, texts, served[PLAIN], is_promised, oracle)
    num_equal, num_ties = (None, 0) if oracle is None else _like(where, prompts, served[PLAIN], oracle)
    return ServedTokens(
        strategies=names,
        num_prompts=len(prompts),
        num_tokens=sum(len(text) for text in served[PLAIN]),
        num_equal={name: sum(map(list.__eq__, texts, served[PLAIN])) for name, texts in served.items()},
        num_equal_to_transformers=num_equal,
        num_ties=num_ties,
    )


def _same(
    who: str,
    prompts: Sequence[list[int]],
    texts: list[list[int]],
    plain: list[list[int]],
    is_promised: bool,
    oracle: Oracle | None,
) -> None:
    """ParityError where a text leaves plain decoding's.

    is_promised: every program has a range of equal bits. Without, a text may leave at a tie, and where no oracle can
    say what a tie is, the figures are told and no more.
    """
    for number, (got, wanted) in enumerate(zip(texts, plain, strict=True)):
        first = _first_difference(got, wanted)
        if first is None:
            continue
        tokens = [got[first], wanted[first]]
        if is_promised or (oracle is not None and oracle.gap(prompts[number], wanted, first, tokens) > MAX_ERROR):
            raise ParityError(
                f"{who} leaves plain decoding at token {first} of calibration prompt {number} "
                f"({got[first]}, plain decoding {wanted[first]}); no artifact was written"
            )


def _like(where: str, prompts: Sequence[list[int]], texts: list[list[int]], oracle: Oracle) -> tuple[int, int]:
    """How many texts are Hugging Face's, and how many leave them at a tie; ParityError at any other difference."""
    num_ties = 0
    for number, (prompt, got) in enumerate(zip(prompts, texts, strict=True)):
        wanted = oracle.logits(prompt, got).argmax(-1).tolist()
        first = _first_difference(got, wanted)
        if first is None:
            continue
        gap = oracle.gap(prompt, got, first, [got[first]])
        if not gap <= MAX_ERROR:
            raise ParityError(
                f"{where}: plain decoding leaves transformers at token {first} of calibration prompt {number} "
                f"({got[first]}, transformers {wanted[first]}, whose logit is {gap:.2e} of the largest higher); "
                "no artifact was written"
            )
        num_ties += 1
    return len(texts) - num_ties, num_ties


def _first_difference(got: list[int], wanted: list[int]) -> int | None:
    assert len(got) == len(wanted), (got, wanted)
    return next((i for i, (a, b) in enumerate(zip(got, wanted, strict=True)) if a != b), None)
