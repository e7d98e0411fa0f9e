"""The command line of export: from a heads folder or a config to an artifact."""

from __future__ import annotations

import argparse
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:  # torch and transformers take seconds, `--help` and a wrong option should not
    from train.heads import ExitConfig
    from train.model import EarlyExitModel
    from train.promise import Promise

BACKENDS = ("eager", "inductor", "onnx", "tensorrt")  # of export.backends, whose import takes seconds
DTYPES = ("float32", "bfloat16")
OF_ARTIFACTS = (
    "backend", "max_model_len", "block_size", "prefill_chunk", "autotune", "workers", "no_cache", "push_to_hub",
)  # fmt: skip


class Source(NamedTuple):
    """Where base and heads come from."""

    base: str
    revision: str | None
    exits: list[ExitConfig]
    heads: Path | None  # None: nothing trained
    reference: dict[str, Any] | None = None  # exits.json on a new reference model, which is not the base
    promise: Promise | None = None  # what validation says of the exits, where it was written down


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0; 2 for what the user can put right, 1 when a program fails its check or a disk, 143 after SIGTERM."""
    args = _parser().parse_args(argv)
    try:
        with _stopped_by_sigterm():
            return _run(args)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: {error}; no artifact was written", file=sys.stderr)
        return 1
    except RuntimeError as error:
        if type(error).__name__ != "ParityError":
            raise
        print(f"error: {error}", file=sys.stderr)
        return 1


@contextmanager
def _stopped_by_sigterm() -> Iterator[None]:
    """SIGTERM ends the export as an exception does, so that nothing unfinished stays behind."""

    def stop(*_: object) -> None:
        raise SystemExit(128 + signal.SIGTERM)

    if threading.current_thread() is not threading.main_thread():  # signals are not ours there
        yield
        return
    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m export", description="Export a base model and its exits as an artifact that infer runs."
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--checkpoint", type=Path, metavar="DIR", help="heads/ that `python -m train fit` wrote, or a hub id of one"
    )
    source.add_argument("--config", type=Path, metavar="YAML", help="training config, for exits that are all native")
    parser.add_argument("--output", type=Path, metavar="DIR", help="artifact folder to write")
    parser.add_argument(
        "--hf-draft",
        type=Path,
        metavar="DIR",
        help="write each exit as a plain Hugging Face model, DIR/<exit>, for assistant_model; with or without --output",
    )
    parser.add_argument(
        "--backend", default="inductor,eager", help="some of eager, inductor, onnx, tensorrt (default: %(default)s)"
    )
    parser.add_argument("--dtype", default="float32", help="float32, bfloat16, or both (default: %(default)s)")
    parser.add_argument("--device", default="cpu", help="cpu (default) or cuda")
    parser.add_argument("--max-model-len", type=int, metavar="N", help="longest sequence (default: the base's, ≤ 4096)")
    parser.add_argument("--block-size", type=int, default=16, metavar="N", help="tokens a KV block (default: 16)")
    parser.add_argument(
        "--prefill-chunk", type=int, default=128, metavar="N", help="prompt tokens a call (default: 128)"
    )
    parser.add_argument(
        "--push-to-hub", metavar="OWNER/NAME", help="then push the artifact there; public, if the repository is new"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace what stands at --output and --hf-draft")
    parser.add_argument(
        "--autotune",
        action="store_true",
        help="inductor, bfloat16: choose GEMM kernels by trial: 1.5× faster programs, minutes more, on an idle machine",
    )
    parser.add_argument(
        "--workers", type=int, metavar="N", help="programs that compile at once (default: 2, with --autotune 1)"
    )
    parser.add_argument(
        "--no-cache",
        action="store_true",
        help="inductor: compile every program, and keep none for the next export (in ~/.cache/hispec or HISPEC_CACHE)",
    )
    return parser


def _run(args: argparse.Namespace) -> int:
    if args.output is None:
        _refuse_options_of_artifacts(args)
    backends = _choices("--backend", args.backend, BACKENDS)
    dtypes = _choices("--dtype", args.dtype, DTYPES)
    if "tensorrt" in backends:  # it can be had on few machines: asked before the seconds of the other imports
        from export.backends import tensorrt

        tensorrt.check_available(args.device, dtypes)
    args.workers = args.workers if args.workers is not None else 1 if args.autotune or args.device == "cuda" else 2
    if args.device != "cpu":  # with torch
        from infer.device import check_device

        check_device(args.device)
    if args.workers < 1:
        raise ValueError(f"--workers {args.workers} must be at least 1")
    if args.autotune and args.device == "cpu" and not ("inductor" in backends and "bfloat16" in dtypes):
        raise ValueError(f"--autotune changes bfloat16 programs of inductor alone, not {args.dtype} of {args.backend}")
    if args.autotune and args.workers > 1:
        raise ValueError(
            f"--workers {args.workers} with --autotune would time kernels beside a compiler: use --workers 1"
        )
    from export.artifact_card import artifact_card
    from export.hf_draft import DraftOptions, check_folder, check_forms, write_drafts
    from export.writer import ExportOptions, check_options, write_artifact
    from infer.artifact import Artifact
    from infer.hub import cache_root, check_login, find_folder, push_folder
    from train.base_model import find_tokenizer
    from train.reference import describe_reference

    artifact, drafts = None, None
    if args.output is not None:
        artifact = ExportOptions(
            output=args.output,
            backends=backends,
            dtypes=dtypes,
            device=args.device,
            max_model_len=args.max_model_len,
            block_size=args.block_size,
            prefill_chunk=args.prefill_chunk,
            overwrite=args.overwrite,
            autotune=args.autotune,
            num_workers=args.workers,
            cache=None if args.no_cache else cache_root() / "packages",
        )
        check_options(artifact)
    if args.hf_draft is not None:
        drafts = DraftOptions(folder=args.hf_draft, dtypes=dtypes, device=args.device, overwrite=args.overwrite)
        _check_apart(args.output, args.hf_draft)
        check_folder(drafts)
    if args.push_to_hub is not None:
        check_login(args.push_to_hub)
    source = read_source(None if args.checkpoint is None else find_folder(args.checkpoint), args.config)
    if artifact is not None:
        artifact = replace(artifact, reference=source.reference, promise=source.promise)
    if drafts is not None:
        drafts = replace(drafts, reference=source.reference)
        check_forms(source.exits)
    started = time.perf_counter()

    def report(line: str) -> None:
        print(f"[{time.perf_counter() - started:4.0f} s] {line}", flush=True)

    report(f"base {source.base}, exits " + ", ".join(f"{e.name}@{e.layer} {e.head}" for e in source.exits))
    if source.reference is not None:
        report(f"the reference is a new model, not {describe_reference(source.reference)}")
    if artifact is not None and source.promise is None:
        report("no validation.json with the heads: acceptance is not checked (python -m train promise writes one)")
    tokenizer = find_tokenizer(source.base, source.revision)
    if tokenizer is None:
        report(f"{source.base} has no tokenizer: what is written will take token ids only")
    if drafts is not None:
        write_drafts(lambda dtype: load_model(source, dtype), tokenizer, drafts, report)
        report(f"wrote {drafts.folder}")
    if artifact is not None:
        write_artifact(lambda dtype: load_model(source, dtype), tokenizer, artifact, report)
        report(f"wrote {artifact.output}")
        if args.push_to_hub is not None:
            card = artifact_card(Artifact.open(artifact.output), args.push_to_hub)
            address = push_folder(artifact.output, args.push_to_hub, card, "HiSpec artifact")
            report(f"pushed it to {address}: LLM({args.push_to_hub!r}) runs it")
    return 0


def _refuse_options_of_artifacts(args: argparse.Namespace) -> None:
    """ValueError unless there is something to write, and no option asks for what won't be."""
    if args.hf_draft is None:
        raise ValueError(
            "nothing to write: give --output DIR for an artifact, --hf-draft DIR for plain models, or both"
        )
    for name in OF_ARTIFACTS:
        if getattr(args, name) != _parser().get_default(name):
            raise ValueError(f"--{name.replace('_', '-')} is for an artifact: give --output DIR too, or leave it out")


def _check_apart(output: Path | None, drafts: Path) -> None:
    """ValueError when one of two folders would lie in the other, and go when that one is replaced."""
    if output is None:
        return
    first, second = output.resolve(), drafts.resolve()
    if first.is_relative_to(second) or second.is_relative_to(first):
        raise ValueError(f"--hf-draft {drafts} and --output {output} must not lie in each other: choose another folder")


def _choices(flag: str, value: str, allowed: Sequence[str]) -> tuple[str, ...]:
    """The comma-separated list of a flag."""
    chosen = tuple(dict.fromkeys(part.strip() for part in value.split(",") if part.strip()))
    for name in chosen:
        if name not in allowed:
            raise ValueError(f"{flag} {name!r} is unknown; expected some of {', '.join(allowed)}")
    if not chosen:
        raise ValueError(f"{flag} is empty; expected some of {', '.join(allowed)}")
    return chosen


def read_source(checkpoint: Path | None, config: Path | None) -> Source:
    """What to export, from a heads folder or a training config; ValueError names what is missing there."""
    from train.config_file import model_section
    from train.heads import exit_configs
    from train.model import read_heads_record
    from train.promise import Promise
    from train.reference import base_of

    if checkpoint is not None:
        record = read_heads_record(checkpoint)
        base, revision = base_of(checkpoint, record)
        promise = Promise.read(checkpoint)
        return Source(base, revision, exit_configs(record["exits"]), checkpoint, record.get("backbone"), promise)
    assert config is not None
    section = model_section(config)
    exits = exit_configs(section.get("exits") or [])
    for e in exits:
        if e.head != "native" or e.vocab_size is not None:
            raise ValueError(
                f"{config}: exits.{e.name} (head {e.head}, vocab_size {e.vocab_size}) needs training: "
                "run python -m train fit and give its heads folder with --checkpoint"
            )
    return Source(section["base"], section.get("revision"), exits, None)


def load_model(source: Source, dtype: str) -> EarlyExitModel:
    """Base and heads in `dtype`; the base as training has left it."""
    import torch

    from train.base_model import load_base
    from train.model import EarlyExitModel, read_heads_record
    from train.reference import load_reference

    if source.reference is not None and source.heads is not None:
        base = load_reference(source.heads, read_heads_record(source.heads), dtype)
    else:
        base = load_base(source.base, source.revision, dtype=dtype)
    model = EarlyExitModel(base, source.exits)
    model.heads.to(getattr(torch, dtype))  # heads have no buffers that must stay fp32; the base was loaded in dtype
    if source.heads is not None:
        model.load_heads(source.heads)
    for e in model.missing_draft_vocabs():
        raise ValueError(f"{source.heads}: draft_vocab.{e.name}.safetensors is missing, but exits.{e.name} is trimmed")
    return model.eval().requires_grad_(False)
