"""How many replicas a load takes, how large their batches, how many KV blocks and how much memory: arithmetic alone.

Speeds are measured elsewhere: plain decoding's by `infer bench` at each batch size, and how much faster the planned
strategy is by `infer plan`. Both include the prompts' own time, so prompts and lengths should be like those that will
be served. Knows no command line.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from infer.manifest import Manifest
from infer.plan import Plan
from infer.planner import PLAIN
from infer.pool_size import BYTES_PER_SCORE, bytes_per_block
from infer.stage import num_scratch_blocks
from infer.strategy import Setting, most_scored, stages_of

# Python, PyTorch, the server, without weights and pool: 0.41 GB with a tiny model on a CPU; the rest is for buffers
PROCESS_BYTES = 1_000_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """What is asked of all replicas together."""

    requests_per_second: float
    prompt_tokens: int  # of a request, the mean
    new_tokens: int
    utilization: float = 0.7
    """Share of its greatest speed at which a replica shall run: the rest is for swings, without which queues grow."""
    max_seconds: float | None = None
    """That a request may take once it runs; None: any time."""

    def __post_init__(self) -> None:
        for name in ("requests_per_second", "prompt_tokens", "new_tokens", "max_seconds"):
            if (value := getattr(self, name)) is not None and not 0 < value < math.inf:
                raise ValueError(f"{name}={value} must be more than 0")
        if not 0 < self.utilization <= 1:
            raise ValueError(f"utilization={self.utilization} must be more than 0 and at most 1, e.g. 0.7")

    @property
    def tokens_per_second(self) -> float:
        return self.requests_per_second * self.new_tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class Replica:
    """One that decodes full batches of one size."""

    batch_size: int
    strategy: str
    plain_tokens_per_second: float
    ratio: float  # of the strategy's speed to plain decoding's
    blocks_per_row: int  # of a whole request; a strategy's scratch blocks with it
    block_bytes: int
    score_bytes: int  # of one round, while tokens are picked
    weight_bytes: int

    @property
    def tokens_per_second(self) -> float:
        """Of all rows together."""
        return self.plain_tokens_per_second * self.ratio

    @property
    def num_blocks(self) -> int:
        """With the null block."""
        return 1 + self.batch_size * self.blocks_per_row

    @property
    def memory_bytes(self) -> int:
        return self.weight_bytes + self.num_blocks * self.block_bytes + self.score_bytes + PROCESS_BYTES

    def seconds(self, load: Load) -> float:
        """That a request takes once it runs: its rows share the speed evenly."""
        return load.new_tokens * self.batch_size / self.tokens_per_second

    def num_replicas(self, load: Load) -> int:
        return math.ceil(load.tokens_per_second / (self.tokens_per_second * load.utilization))

    def num_running(self, load: Load) -> float:
        """Requests that run at once in each of so many replicas, on average (Little's law: rate times time)."""
        return load.requests_per_second / self.num_replicas(load) * self.seconds(load)


def replicas(
    manifest: Manifest,
    plan: Plan | None,
    speeds: Mapping[int, float],
    load: Load,
    *,
    weight_bytes: int,
    itemsize: int,
) -> list[Replica]:
    """One for each batch size, in ascending order.

    Args:
        speeds: batch size → plain decoding's tokens per second, of all rows together.
        weight_bytes: of all programs.
        itemsize: bytes of one number of K or V.

    Raises:
        ValueError: a request is longer, or a batch larger, than the artifact allows.
    """
    limits, length = manifest.limits, load.prompt_tokens + load.new_tokens
    if length > limits.max_model_len:
        raise ValueError(
            f"prompt_tokens={load.prompt_tokens} and new_tokens={load.new_tokens} are {length} tokens, the artifact "
            f"takes {limits.max_model_len}: give fewer, or export with a greater --max-model-len"
        )
    for batch_size, speed in speeds.items():
        if not 1 <= batch_size <= limits.max_batch:
            raise ValueError(f"batch size {batch_size} must lie between 1 and {limits.max_batch}, the artifact's limit")
        if not 0 < speed < math.inf:
            raise ValueError(f"{speed:g} tokens per second at batch size {batch_size} must be more than 0")
    if not speeds:
        raise ValueError("give plain decoding's speed at one batch size at least, as `infer bench` measures it")
    planned: list[Setting] = [*(plan.settings if plan else ()), Setting(PLAIN)]
    # A server takes what the whole plan may need, as it moves within it
    scratch = max(num_scratch_blocks(stages_of(*one, manifest), manifest.block_size) for one in planned)
    num_scored = max(most_scored(policy, manifest) for _, policy in planned)
    found = []
    for batch_size in sorted(speeds):
        chosen = plan.entry_for(batch_size).chosen if plan else None
        found.append(
            Replica(
                batch_size=batch_size,
                strategy=chosen.strategy if chosen else PLAIN,
                plain_tokens_per_second=speeds[batch_size],
                ratio=chosen.ratio if chosen else 1.0,
                blocks_per_row=-(-length // manifest.block_size) + scratch,
                block_bytes=bytes_per_block(manifest, itemsize),
                score_bytes=batch_size * num_scored * manifest.base.vocab_size * BYTES_PER_SCORE,
                weight_bytes=weight_bytes,
            )
        )
    return found


def choose(found: Sequence[Replica], load: Load) -> Replica:
    """The one of which fewest are needed; of equal ones the smallest batch, which is quickest for each request.

    ValueError if every one is too slow for `load.max_seconds`.
    """
    quick = [one for one in found if load.max_seconds is None or one.seconds(load) <= load.max_seconds]
    if not quick:
        least = min(one.seconds(load) for one in found)
        raise ValueError(
            f"max_seconds={load.max_seconds:g}: a request of {load.new_tokens} new tokens takes {least:.1f} s at "
            "least: allow more, ask for fewer new tokens, or take a faster machine"
        )
    return min(quick, key=lambda one: (one.num_replicas(load), one.batch_size))


def explain(one: Replica, load: Load) -> Iterator[tuple[str, str]]:
    """(what, the formula with its numbers and what comes of it)."""
    speed, asked, batch_size, num_replicas = (
        one.tokens_per_second, load.tokens_per_second, one.batch_size, one.num_replicas(load)
    )  # fmt: skip
    rate, seconds, kv = load.requests_per_second, one.seconds(load), one.num_blocks * one.block_bytes
    parts = [
        f"weights {_gb(one.weight_bytes)}",
        f"KV {one.num_blocks} × {one.block_bytes} B = {_gb(kv)}",
        f"scores {_gb(one.score_bytes)}",
        f"process {_gb(PROCESS_BYTES)}",
    ]
    plain = f"{one.plain_tokens_per_second:g} plain tokens/s at batch {batch_size}"
    yield "load", f"{rate:g} requests/s × {load.new_tokens} new tokens = {asked:.1f} tokens/s"
    yield "speed of one", f"{plain} × {one.ratio:.2f} ({one.strategy}) = {speed:.1f} tokens/s"
    yield "replicas", f"⌈{asked:g} / ({speed:.1f} × {load.utilization:g} utilization)⌉ = {num_replicas}"
    yield "time", f"{load.new_tokens} new tokens × {batch_size} rows / {speed:.1f} = {seconds:.1f} s, once it runs"
    running = f"{one.num_running(load):.1f} of {batch_size} places"
    yield "running at once", f"{rate:g} requests/s / {num_replicas} replicas × {seconds:.1f} s = {running}"
    yield "KV blocks", f"1 + {batch_size} rows × {one.blocks_per_row} = {one.num_blocks}"
    yield "memory", f"{' + '.join(parts)}: {_gb(one.memory_bytes)} GB"
    yield "serve with", f"--max-num-seqs {batch_size} --num-blocks {one.num_blocks}"


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f}"
