"""Losslessness on the user's own prompts: every strategy and batch size against plain decoding of one row at a time.

Against Hugging Face only what both compute alike can be expected equal: where two tokens' logits are nearer than the
error that export measured, either is right, and the difference is reported as a tie.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from infer.artifact import JUST_IN_TIME
from infer.llm import LLM
from infer.output import check_whole
from infer.params import SamplingParams
from infer.peers import Peer
from infer.strategy import LOSSY, Policy

PLAIN = "autoregressive"


@dataclass(frozen=True, slots=True)
class Difference:
    """The first token at which a text leaves plain decoding's."""

    prompt: int
    position: int  # in the answer
    # Where a peer can tell, of its logits there: from the largest to the lower of the two texts' tokens, and between
    # the two largest; the same figure if these are the two texts' tokens
    gap: float | None = None
    top_two: float | None = None
    allowed: float | None = None  # how far the peer's logits and ours may lie apart

    @property
    def is_tie(self) -> bool:
        return self.gap is not None and self.allowed is not None and self.gap <= self.allowed


@dataclass(slots=True)
class Comparison:
    """One contender at one batch size."""

    name: str
    batch_size: int
    num_prompts: int
    num_tokens: int
    differences: list[Difference] = field(default_factory=list)

    @property
    def is_lossless(self) -> bool:
        return all(difference.is_tie for difference in self.differences)

    def divergence(self) -> dict[str, Any]:
        """How often texts leave plain decoding's, where, and how near the logits lie there; ready for JSON.

        Positions and gaps are (least, median, largest), None where there is none.
        """
        return {
            "rate": len(self.differences) / self.num_prompts,
            "num_ties": sum(d.is_tie for d in self.differences),
            "position": _spread([d.position for d in self.differences]),
            "top_two": _spread([d.top_two for d in self.differences if d.top_two is not None]),
            "gap": _spread([d.gap for d in self.differences if d.gap is not None]),
        }

    def record(self) -> dict[str, Any]:
        """All of it, ready for JSON."""
        return {
            "strategy": self.name,
            "batch_size": self.batch_size,
            "num_prompts": self.num_prompts,
            "num_identical": self.num_prompts - len(self.differences),
            "num_tokens": self.num_tokens,
            "is_lossless": self.is_lossless,
            "divergence": self.divergence(),
            "differences": [asdict(d) | {"is_tie": d.is_tie} for d in self.differences],
        }


def _spread(values: Sequence[float]) -> tuple[float, float, float] | None:
    return (min(values), statistics.median(values), max(values)) if values else None


def check(
    llm: LLM,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    *,
    strategies: Sequence[str],
    batch_sizes: Sequence[int],
    policy: Policy,
    peer: Peer | None = None,
    max_logit_error: float = 0.0,
    on_result: Callable[[Comparison], None] = lambda _: None,
    on_progress: Callable[[str], None] = lambda _: None,
) -> list[Comparison]:
    """Compare all of them.

    Args:
        params: greedy, or with a seed: without one every run would draw its own.
        peer: Hugging Face's greedy texts are compared as well.
        max_logit_error: of the artifact's target against the model, relative to the largest logit (parity.json).
        on_progress: told what is decoded, before each group of `batch_size` prompts.

    Raises:
        ValueError: a request failed, or a strategy is lossy by design.
    """
    if lossy := LOSSY.intersection(strategies):
        raise ValueError(
            f"strategies: {', '.join(lossy)} is lossy by design, leave it out: bench shows how far it agrees"
        )
    assert params.is_greedy or params.seed is not None, params

    def texts(strategy: str, batch_size: int) -> list[list[int]]:
        llm.use(strategy, policy)
        groups = [list(prompts[i : i + batch_size]) for i in range(0, len(prompts), batch_size)]
        outputs = []
        for number, group in enumerate(groups):
            on_progress(f"{strategy}, batch {batch_size}: {number * batch_size} of {len(prompts)} prompts")
            outputs += llm.generate(group, params)
        on_progress("")
        check_whole(outputs)
        return [list(output.outputs[0].token_ids) for output in outputs]

    plain = texts(PLAIN, 1)
    results: list[Comparison] = []

    def compare(name: str, batch_size: int, got: list[list[int]]) -> None:
        result = Comparison(name, batch_size, len(prompts), sum(len(ids) for ids in got))
        for number, (ids, expected) in enumerate(zip(got, plain, strict=True)):
            if ids != expected:
                result.differences.append(_difference(number, ids, expected, prompts, peer, max_logit_error))
        results.append(result)
        on_result(result)

    for strategy in strategies:
        for batch_size in batch_sizes:
            if (strategy, batch_size) != (PLAIN, 1):
                compare(strategy, batch_size, texts(strategy, batch_size))
    if peer is not None:
        assert params.is_greedy and params.max_tokens is not None, params
        compare("transformers", 1, [peer.generate([prompt], params.max_tokens)[0][0] for prompt in prompts])
    return results


def target_error(llm: LLM) -> float:
    """What export measured of its programs: the target's largest error, relative to the largest logit.

    Backend `compile` runs eager's programs, and has their figure.
    """
    build = replace(llm.build, backend="eager") if llm.build.backend == JUST_IN_TIME else llm.build
    report = json.loads((llm.artifact.path / "parity.json").read_text())["programs"][build.folder_name]
    target = llm.manifest.tiers[-1].name
    return max(tier["max_error"] for tier in report if tier["tier"] == target)


def _difference(
    number: int,
    got: list[int],
    expected: list[int],
    prompts: Sequence[Sequence[int]],
    peer: Peer | None,
    max_logit_error: float,
) -> Difference:
    shared = next((i for i, (a, b) in enumerate(zip(got, expected)) if a != b), min(len(got), len(expected)))
    if peer is None:
        return Difference(number, shared)
    tokens = [text[shared] for text in (got, expected) if shared < len(text)]
    margins = peer.margins([*prompts[number], *expected[:shared]], tokens)
    return Difference(number, shared, margins.gap, margins.top_two, max_logit_error * margins.largest)
