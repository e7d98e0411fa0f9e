"""Options that several commands share, and what is made of them. Importing this file imports no torch."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from infer.llm import LLM
    from infer.params import SamplingParams
    from infer.prompts import PromptRow
    from infer.strategy import Policy


# ---- how the model runs ----


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("artifact", help="folder that `python -m export` wrote")
    add_llm_options(parser)


def add_strategy_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--strategy", default="auto", help="e.g. layerskip, hispec, prompt_lookup; auto (default) goes by plan.json"
    )
    parser.add_argument("--verification", default="identity", help="identity (default) or rejection, of sampled drafts")
    parser.add_argument(
        "--workload", default="", help="kind of text that auto follows its plan for (see infer plan --by-workload)"
    )


def add_llm_options(parser: argparse.ArgumentParser) -> None:
    """Those of `llm_options`."""
    parser.add_argument(
        "--backend",
        default="auto",
        help="inductor, eager, onnx or auto (default); inductor,eager: the first that runs here; compile: eager's "
        "programs by torch.compile, at every start",
    )
    parser.add_argument("--dtype", help="float32 or bfloat16; default: the artifact's first")
    parser.add_argument("--device", default="cpu", help="cpu (default) or cuda, as exported")
    parser.add_argument("--enforce-eager", action="store_true", help="no CUDA graphs (there are none on CPU)")
    parser.add_argument("--num-draft-tokens", type=int, default=2, help="γ, tokens drafted per judgement (default 2)")
    parser.add_argument("--window", type=int, default=4, help="N_i, tentative tokens that call the target (default 4)")
    parser.add_argument(
        "--inner-rounds", type=int, default=4, help="R, early verifications per target call (default 4)"
    )
    parser.add_argument(
        "--num-lookup-tokens", type=int, default=8, help="k, most tokens looked up in a row's own text (default 8)"
    )
    parser.add_argument("--max-ngram", type=int, default=4, help="most of its last tokens looked for (default 4)")
    parser.add_argument("--min-ngram", type=int, default=2, help="fewest of them (default 2)")
    parser.add_argument(
        "--confidence-threshold", type=float, default=0.0,
        help="stop drafting where the exit gives no id so much probability, e.g. 0.5 (default 0: never)",
    )  # fmt: skip
    parser.add_argument(
        "--exit-threshold", type=float, default=0.8,
        help="adadecode takes a token from the lowest exit that gives some id so much probability (default 0.8)",
    )  # fmt: skip
    parser.add_argument("--lookahead-window", type=int, default=4, help="W, columns of lookahead's window (default 4)")
    parser.add_argument("--lookahead-ngram", type=int, default=4, help="N, tokens of its n-grams (default 4)")
    parser.add_argument("--lookahead-guesses", type=int, default=4, help="G, n-grams verified at once (default 4)")
    parser.add_argument(
        "--num-branches", type=int, default=0,
        help="most other candidates of the draft exit verified beside its draft (default 0, none; 3 is a good number)",
    )  # fmt: skip
    parser.add_argument(
        "--branch-threshold", type=float, default=0.05,
        help="probability from which a candidate is worth a branch (default 0.05)",
    )  # fmt: skip
    parser.add_argument(
        "--allow-lossy", action="store_true", help="allow strategies that do not give the target's own texts: sprinter"
    )
    parser.add_argument("--max-num-seqs", type=int, default=16, help="most prompts at once (default 16)")
    parser.add_argument(
        "--max-num-prefill-tokens", type=int, default=512, help="most prompt tokens between two rounds (default 512)"
    )
    parser.add_argument("--enable-prefix-caching", action="store_true", help="keep prompts' KV for later prompts")
    parser.add_argument(
        "--num-blocks",
        type=int,
        help="KV blocks in the pool; default: full rows, at most 1 GiB",
    )
    parser.add_argument(
        "--gpu-memory-utilization", type=float, default=0.9, help="share that weights and pool may fill (default 0.9)"
    )
    parser.add_argument(
        "--bitwise",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="no-bitwise is the fastest: a token may depend on its batch where two logits lie in the last bits",
    )


def policy_of(args: argparse.Namespace) -> Policy:
    """Every number of a policy is an option of its name."""
    from infer.strategy import Policy

    return Policy(**{field.name: getattr(args, field.name) for field in fields(Policy)})


def load_llm(args: argparse.Namespace, strategy: str, verification: str = "identity") -> LLM:
    from infer.llm import LLM

    return LLM(args.artifact, **llm_options(args, strategy, verification))


def llm_options(args: argparse.Namespace, strategy: str, verification: str = "identity") -> dict[str, Any]:
    """`LLM`'s keyword arguments, of plain types, as they also travel to other processes."""
    return {
        "strategy": strategy,
        "backend": args.backend,
        "dtype": args.dtype,
        "device": args.device,
        "enforce_eager": args.enforce_eager,
        "num_blocks": args.num_blocks,
        "gpu_memory_utilization": args.gpu_memory_utilization,
        "max_num_seqs": args.max_num_seqs,
        "max_num_prefill_tokens": args.max_num_prefill_tokens,
        "enable_prefix_caching": args.enable_prefix_caching,
        "bitwise": args.bitwise,
        "workload": getattr(args, "workload", ""),  # of commands with add_strategy_options
        "verification": verification,
        "allow_lossy": args.allow_lossy,
        **asdict(policy_of(args)),
    }


def need_packages(what: str, extra: str, packages: Sequence[str]) -> None:
    """ValueError, with the command that installs it, if one of them is missing; nothing is imported."""
    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise ValueError(f"{what} needs the package {package}: pip install 'hispec[{extra}]'")


# ---- what is decoded, and in which ways ----


def is_plain(params: SamplingParams) -> bool:
    """Whether a peer can do the same: greedy, with nothing asked for but a length."""
    from infer.params import SamplingParams

    return params == SamplingParams(temperature=0, max_tokens=params.max_tokens, seed=params.seed)


def need_seed(params: SamplingParams, flag: str) -> None:
    if not params.is_greedy and params.seed is None:
        raise ValueError(f"{flag} compares sampled text only under --seed: without one every run draws its own")


def add_prompt_options(parser: argparse.ArgumentParser, *, needs_prompts: bool = False, default: str = "") -> None:
    parser.add_argument(
        "--prompts",
        "--data-dir",
        type=Path,
        required=needs_prompts,
        help="prompt file, or a folder of .jsonl" + (f"; default: {default}" if default else ""),
    )
    parser.add_argument("--num-prompts", type=int, help="take this many, spread evenly over the file")


def add_comparison_options(parser: argparse.ArgumentParser, *, needs_prompts: bool = True) -> None:
    add_prompt_options(parser, needs_prompts=needs_prompts)
    parser.add_argument(
        "--strategies",
        default="autoregressive,layerskip,hispec",
        help="comma-separated; all: every one that the artifact and these numbers allow",
    )
    parser.add_argument("--batch-sizes", default="1", help="comma-separated, e.g. 1,8")


def prompt_rows(args: argparse.Namespace, default: Sequence[PromptRow] = ()) -> list[PromptRow]:
    """Those of the file that was named, or `default`; as many as were asked for."""
    from infer.prompts import read_prompts

    return some_of(args, read_prompts(args.prompts) if args.prompts else list(default))


def some_of(args: argparse.Namespace, rows: list[PromptRow]) -> list[PromptRow]:
    """As many as --num-prompts says, spread over all."""
    if args.num_prompts is None or args.num_prompts >= len(rows):
        return rows
    if args.num_prompts < 1:
        raise ValueError(f"--num-prompts={args.num_prompts} must be at least 1")
    step = len(rows) / args.num_prompts
    return [rows[int(i * step)] for i in range(args.num_prompts)]


def strategy_names(args: argparse.Namespace, llm: LLM, *, lossy: bool = True) -> list[str]:
    """Those of --strategies, each tried for whether it can run here, before any work.

    lossy: whether `all` holds such, where they are allowed.
    """
    from infer.strategy import LOSSY

    if args.strategies == "all":
        verifications = getattr(args, "verifications", "identity").split(",")  # `check` has none
        return [name for name in llm.supported(policy_of(args), verifications) if lossy or name not in LOSSY]
    names: list[str] = args.strategies.split(",")
    for name in names:
        if name != "auto":  # of a plan, which has seen to it
            llm.use(name, policy_of(args))
    llm.use("autoregressive")
    return names


def batch_sizes(args: argparse.Namespace) -> list[int]:
    try:
        sizes = [int(size) for size in args.batch_sizes.split(",")]
    except ValueError:
        raise ValueError(f"--batch-sizes={args.batch_sizes!r} must be whole numbers, e.g. 1,8") from None
    if min(sizes) < 1:
        raise ValueError(f"--batch-sizes={args.batch_sizes} must be at least 1")
    return sizes


def token_ids(llm: LLM, row: PromptRow, raw: bool = False) -> list[int]:
    """The row's conversation in the chat template; its text alone if there is none, or `raw`."""
    if not raw and llm.tokenizer.chat_template:
        return llm.chat_prompt(row.messages)
    try:
        return list(llm.tokenizer(row.text)["input_ids"])
    except TypeError as error:  # in whose words half a character is no text
        raise ValueError(f"prompt {row.id}: not a text that can be tokenized ({error})") from error


# ---- files and the terminal ----


def show_progress(text: str) -> None:
    """In place of what it said before, if standard error is a terminal: a log would keep every line of it."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def check_output(path: Path | None, flag: str = "--output") -> None:
    if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
        raise ValueError(f"{flag} {path}: name a file in a folder that exists")


def write_whole(path: Path, text: str) -> None:
    """The file appears complete, or what was there before stays."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)
