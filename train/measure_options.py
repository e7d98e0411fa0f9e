"""What `python -m train measure` takes, from the command line; imports nothing heavy, so that --help is quick."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from train.option_parser import OptionParser


@dataclass(frozen=True, kw_only=True)
class MeasureOptions:
    """What `measure` takes besides the options of `fit`."""

    artifact: Path
    num_prompts: int = 32
    max_new_tokens: int = 96
    tolerance: float = 3.0  # points

    def __post_init__(self) -> None:
        for name, least in (("num_prompts", 1), ("max_new_tokens", 2)):  # one token leaves no room for a draft
            if getattr(self, name) < least:
                raise ValueError(f"--{name}={getattr(self, name)} must be at least {least}")
        if not self.tolerance > 0:
            raise ValueError(f"--tolerance={self.tolerance:g} must be greater than 0 (points)")


def parse_options(argv: Sequence[str]) -> tuple[MeasureOptions, list[str]]:
    """Our own options, and the rest, which is for LightningCLI."""
    parser = OptionParser(
        prog="python -m train measure",
        description="Acceptance as validation counts it and as the engine does, on the same text.",
        epilog="All options of `python -m train fit` are taken too; model.warm_start names the exits.",
        allow_abbrev=False,
    )
    parser.add_argument("--artifact", type=Path, required=True, help="folder that `python -m export` made of the exits")
    parser.add_argument("--num_prompts", type=int, default=32, help="held-out rows whose prompts are answered")
    parser.add_argument("--max_new_tokens", type=int, default=96, help="longest answer, in tokens")
    parser.add_argument("--tolerance", type=float, default=3.0, help="points by which the two may differ (default 3)")
    options, rest = parser.parse_known_args(argv)
    return MeasureOptions(**vars(options)), rest
