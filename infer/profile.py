"""Where a step's time goes: the runtime's own work per call with programs that compute nothing, and each part's share
with the real ones.

Both put other callables in the place of the artifact's programs and of `sampler.pick` and take them back at the end;
the normal path knows nothing of it. Only steps in which every row decodes are measured, so no prompts.
"""

# Shape legend: B rows, T query positions, D hidden, E exit size, N tokens of all rows together, V vocabulary

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from infer.judging import IdentityRule
from infer.llm import LLM
from infer.params import SamplingParams
from infer.prompts import PromptRow
from infer.runner import Program
from infer.sampler import pick
from infer.strategy import Policy

NUM_STUB_STEPS, NUM_STEPS = 60, 20
STUB_TOKENS = 256  # after a prompt: enough for many steps, few enough for short block tables
QUESTIONS = (
    "What is the capital of France?",
    "Give me three tips for learning to cook.",
    "Explain to a child why the sky is blue.",
    "Write a short story about a lighthouse keeper.",
)

Parts = defaultdict[str, float]


@dataclass(frozen=True, slots=True)
class Overhead:
    """The runtime's own processor time at one batch size; medians over steps."""

    batch_size: int
    us_per_step: float
    calls_per_step: float  # of programs over pages: trunks and `layer` exits
    us_per_call: float


@dataclass(slots=True)
class StrategyOverhead:
    strategy: str
    sizes: list[Overhead] = field(default_factory=list)

    @property
    def us_per_row(self) -> float | None:
        """What a row more costs a call: the slope of the line of least squares; None with one batch size."""
        batch_sizes = [one.batch_size for one in self.sizes]
        if len(set(batch_sizes)) < 2:
            return None
        return statistics.linear_regression(batch_sizes, [one.us_per_call for one in self.sizes]).slope


@dataclass(frozen=True, slots=True)
class Shares:
    """How a step's time divides."""

    strategy: str
    batch_size: int
    ms_per_step: float  # median
    tokens_per_step: float  # of all rows, mean
    parts: dict[str, float]  # program, "sampling" or "host" → share of all steps' time; they sum to 1


class _Step(NamedTuple):
    seconds: float
    parts: dict[str, float]  # what was written down in it: seconds, or calls, by name
    num_tokens: int


def question_rows() -> list[PromptRow]:
    return [PromptRow(str(i), [{"role": "user", "content": text}]) for i, text in enumerate(QUESTIONS)]


def measure_overhead(
    llm: LLM, strategies: Sequence[str], batch_sizes: Sequence[int], policy: Policy, num_steps: int = NUM_STUB_STEPS
) -> list[StrategyOverhead]:
    """Processor time of the thread that runs the engine, with stubs for programs and picks.

    A stub returns a tensor of the right shape that is there already, and every pick is the same id, so that each draft
    is accepted. Commit is included, and a text's making where a stop string asks for it.
    """
    params = SamplingParams(temperature=0, max_tokens=STUB_TOKENS, ignore_eos=True)
    results = []
    for strategy in strategies:
        result = StrategyOverhead(strategy)
        for batch_size in batch_sizes:
            calls = Parts(float)
            with _instead(llm, strategy, policy, _stubs(llm, batch_size, calls), _stub_pick(llm, batch_size)):
                steps = _steps(llm, [[1, 2, 3]] * batch_size, params, num_steps, time.thread_time, calls)
            result.sizes.append(
                Overhead(
                    batch_size=batch_size,
                    us_per_step=1e6 * statistics.median(step.seconds for step in steps),
                    calls_per_step=statistics.mean(sum(step.parts.values()) for step in steps),
                    us_per_call=1e6 * statistics.median(step.seconds / sum(step.parts.values()) for step in steps),
                )
            )
        results.append(result)
    return results


def measure_shares(
    llm: LLM,
    prompts: Sequence[Sequence[int]],
    strategies: Sequence[str],
    batch_sizes: Sequence[int],
    params: SamplingParams,
    policy: Policy,
    num_steps: int = NUM_STEPS,
) -> list[Shares]:
    """Wall time by part, with the artifact's programs; prompts are repeated until they fill a batch.

    Raises:
        ValueError: the batch never decodes all together.
    """
    params = replace(params, ignore_eos=True)
    results = []
    for strategy in strategies:
        for batch_size in batch_sizes:
            seconds = Parts(float)
            timed = _timer(seconds, llm.engine.runner.device)
            programs = {name: timed(name, program) for name, program in llm.engine.runner.programs.items()}
            group = [prompts[i % len(prompts)] for i in range(batch_size)]
            with _instead(llm, strategy, policy, programs, timed("sampling", pick)):
                steps = _steps(llm, group, params, num_steps, time.perf_counter, seconds)
            total = sum(step.seconds for step in steps)
            parts = Parts(float)
            for step in steps:
                for name, part in step.parts.items():
                    parts[name] += part
            parts["host"] = total - sum(parts.values())
            results.append(
                Shares(
                    strategy=strategy,
                    batch_size=batch_size,
                    ms_per_step=1e3 * statistics.median(step.seconds for step in steps),
                    tokens_per_step=statistics.mean(step.num_tokens for step in steps),
                    parts={name: part / total for name, part in parts.items()},
                )
            )
    return results


@contextmanager
def _instead(
    llm: LLM, strategy: str, policy: Policy, programs: Mapping[str, Program], pick_: Callable[..., Tensor]
) -> Iterator[None]:
    """Other programs and another pick for a while; `strategy` is left chosen."""
    runner, before = llm.engine.runner, llm.engine.runner.programs
    llm.use(strategy, policy)
    runner.bind(programs, bitwise=runner.bitwise)
    rule = llm.engine.round.rule
    assert isinstance(rule, IdentityRule)
    rule.pick = pick_
    try:
        yield
    finally:
        runner.bind(before, bitwise=runner.bitwise)
        rule.pick = pick


def _steps(
    llm: LLM,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    num_steps: int,
    now: Callable[[], float],
    parts: Parts,
) -> list[_Step]:
    """Steps in which all prompts' rows decode; the prompts begin anew as often as it takes."""
    steps: list[_Step] = []
    while len(steps) < num_steps:
        requests = [llm.make_request(prompt, params) for prompt in prompts]
        num_before = len(steps)
        for request in requests:
            request.is_streamed = False  # as in `generate`
            llm.engine.add(request)
        try:
            while len(steps) < num_steps and not any(request.is_finished for request in requests):
                all_decode = all(request.row is not None and request.row.is_ready for request in requests)
                num_tokens = sum(len(request.token_ids) for request in requests)
                parts.clear()
                start = now()
                llm.engine.step()
                seconds = now() - start
                if all_decode:
                    num_new = sum(len(request.token_ids) for request in requests) - num_tokens
                    steps.append(_Step(seconds, dict(parts), num_new))
        finally:
            for request in requests:
                llm.engine.abort(request.request_id)
        if failed := [request.stop_reason for request in requests if request.finish_reason == "error"]:
            raise RuntimeError(failed[0])
        if len(steps) == num_before:
            raise ValueError(
                f"no step in which all of {len(prompts)} prompts decode: raise --max-tokens={params.max_tokens} or "
                f"--num-blocks={llm.engine.pool.num_blocks}"
            )
    return steps


def _timer(seconds: Parts, device: torch.device) -> Callable[[str, Callable[..., Tensor]], Callable[..., Tensor]]:
    """Wraps functions so that their time is added to `seconds` under a name."""

    def timed(name: str, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def run(*args: Any) -> Tensor:
            start = time.perf_counter()
            result = function(*args)
            if device.type == "cuda":  # its work is over only then: a profiled step is slower than a free one
                torch.cuda.synchronize()
            seconds[name] += time.perf_counter() - start
            return result

        return run

    return timed


def _stubs(llm: LLM, batch_size: int, calls: Parts) -> dict[str, Program]:
    """Programs that compute nothing; those over pages are counted."""
    base, device, dtype = llm.manifest.base, llm.engine.runner.device, getattr(torch, llm.dtype)
    longest = batch_size * llm.manifest.limits.max_query_len
    infos = llm.build.programs

    def paged(name: str, width: int) -> Program:
        ready: dict[tuple[int, int], Tensor] = {}

        def run(x: Tensor, positions: Tensor, *_: object) -> Tensor:
            calls[name] += 1
            shape = (positions.shape[0], positions.shape[1])
            if shape not in ready:
                ready[shape] = torch.zeros(*shape, width, dtype=dtype, device=device)
            return ready[shape]

        return run

    def flat(width: int) -> Program:
        ready = torch.zeros(longest, width, dtype=dtype, device=device)  # whole: other programs are handed them
        return lambda states: ready[: len(states)]

    def logits(width: int) -> Program:
        ready = torch.zeros(1, 1, dtype=dtype, device=device).expand(longest, width)  # nobody reads them: one number
        return lambda states: ready[: len(states)]

    vocab_sizes = {f"{e.name}.unembed": e.vocab_size or base.vocab_size for e in llm.manifest.exits}
    stubs = {}
    for name, info in infos.items():
        if info.kv_layers:
            stubs[name] = paged(name, base.hidden_size if name.endswith(".trunk") else base.exit_size)
        elif name.endswith(".exit"):
            stubs[name] = flat(base.exit_size)
        else:
            stubs[name] = logits(vocab_sizes.get(name, base.vocab_size))
    return stubs


def _stub_pick(llm: LLM, batch_size: int) -> Callable[..., Tensor]:
    longest = batch_size * llm.manifest.limits.max_query_len
    ids = torch.full((longest,), llm.manifest.base.vocab_size // 2, device=llm.engine.runner.device)
    return lambda logits, *_: ids[: len(logits)]
