"""How an engine is to run: how much at once, in how much memory, and how its programs are called."""

from __future__ import annotations

from dataclasses import dataclass

from infer.manifest import Manifest


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineOptions:
    """`LLM` says what each of them is.

    Raises:
        ValueError: a number or flag that is none, or out of range.
    """

    num_blocks: int | None  # None: as many as there is room for
    gpu_memory_utilization: float
    enforce_eager: bool
    max_num_seqs: int
    max_num_prefill_tokens: int
    enable_prefix_caching: bool
    bitwise: bool

    def __post_init__(self) -> None:
        for name, value, least in (
            ("max_num_seqs", self.max_num_seqs, 1),
            ("max_num_prefill_tokens", self.max_num_prefill_tokens, 1),
            ("num_blocks", 2 if self.num_blocks is None else self.num_blocks, 2),  # one of them is the null block
        ):
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"{name}={value!r} must be a whole number of at least {least}")
        for name in ("bitwise", "enforce_eager"):
            if not isinstance(flag := getattr(self, name), bool):
                raise ValueError(f"{name}={flag!r} must be True or False")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ValueError(f"gpu_memory_utilization={self.gpu_memory_utilization} must lie in (0, 1]")

    def check_limits(self, manifest: Manifest) -> None:
        """ValueError where the artifact was not made for so much."""
        if self.max_num_seqs > (most := manifest.limits.max_batch):
            raise ValueError(f"max_num_seqs={self.max_num_seqs}: the artifact allows at most {most}")
