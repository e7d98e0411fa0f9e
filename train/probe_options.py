"""What `python -m train probe` takes, from the command line; imports nothing heavy, so that --help answers at once."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from train.option_parser import OptionParser


@dataclass(frozen=True, kw_only=True)
class ProbeOptions:
    """What `probe` takes besides the options of `fit`."""

    num_tokens: int = 8192
    costs: Mapping[str, float] | None = None
    json: Path | None = None
    plot: Path | None = None

    def __post_init__(self) -> None:
        if self.num_tokens < 1:
            raise ValueError(f"--num_tokens={self.num_tokens} must be at least 1")


def parse_options(argv: Sequence[str]) -> tuple[ProbeOptions, list[str]]:
    """Our own options, and the rest, which is for LightningCLI."""
    parser = OptionParser(
        prog="python -m train probe",
        description="How good an exit would be at each depth, and which to train.",
        epilog="All options of `python -m train fit` are taken too: --config FILE, --model.base, --data.train_files, …",
        allow_abbrev=False,  # --data… and --model… are not ours
    )
    parser.add_argument(
        "--num_tokens", type=int, default=8192, help="labels to fit on, and to score on at most (default 8192)"
    )
    parser.add_argument(
        "--costs",
        type=_mapping,
        metavar="{DEPTH: COST}",
        help="measured cost of an exit's call by depth, and of `target`, as shares of a plain decoding step, e.g. "
        "'{2: 0.12, 10: 0.4, target: 1.0}'; other depths follow. They go before model.costs",
    )
    parser.add_argument("--json", type=Path, help="write all figures there")
    parser.add_argument("--plot", type=Path, help="draw them: FILE.png or FILE.svg (needs the extra `plot`)")
    options, rest = parser.parse_known_args(argv)
    return ProbeOptions(**vars(options)), rest


def _mapping(text: str) -> dict[str, float]:
    try:
        values = yaml.safe_load(text)
        return {str(key): float(value) for key, value in values.items()}
    except (yaml.YAMLError, AttributeError, TypeError, ValueError):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no mapping of depths to costs, as {{2: 0.12, target: 1}}"
        ) from None
