"""Writes an artifact: every program, its measurements and the records, into a folder that appears whole or not at all.

It decides nothing about models or compilers; it is the list of steps in order.
"""

from __future__ import annotations

import ctypes
import gc
import json
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file

from export import acceptance, parity, served_tokens
from export.attention import Form, default_attention
from export.backends import BACKENDS
from export.disk import check_space
from export.graphs import Graphs
from export.program_sets import (
    Made,
    build_programs,
    hold_acceptance,
    measure_programs,
    record_set,
    serve_programs,
)
from export.programs import TARGET, Program, export_program, make_programs, tier_spans
from infer import backends
from infer.artifact import Artifact, write_manifest
from infer.batch import RING_SIZE
from infer.manifest import BaseInfo, ExitInfo, Limits, Manifest, TierInfo
from train.base_model import base_fingerprint
from train.model import EarlyExitModel
from train.promise import Promise
from train.whole_folder import whole_folder

MAX_QUERY_LEN = RING_SIZE
MAX_BATCH = 256
DEFAULT_MAX_MODEL_LEN = 4096


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """What to build."""

    output: Path
    backends: tuple[str, ...] = ("eager",)
    dtypes: tuple[str, ...] = ("float32",)
    device: str = "cpu"
    max_model_len: int | None = None  # None: what the base allows, up to DEFAULT_MAX_MODEL_LEN
    block_size: int = 16
    prefill_chunk: int = 128
    overwrite: bool = False
    autotune: bool = False
    num_workers: int = 2  # programs that compile at once
    cache: Path | None = None  # folder of compiled programs, for the next export; None: nothing is kept or taken
    reference: dict[str, Any] | None = None  # what exits.json says of a new reference model
    promise: Promise | None = None  # what validation says of the exits; None: their acceptance is not checked


def check_output(options: ExportOptions) -> None:
    """ValueError when the output folder is in the way, or the options contradict each other."""
    if options.output.exists() and not options.output.is_dir():
        raise ValueError(f"--output {options.output} is a file: name a folder")
    if options.output.exists() and not options.overwrite:
        raise ValueError(f"--output {options.output} exists: choose another folder, or add --overwrite to replace it")
    if options.output.exists() and not (options.output / "hispec.json").is_file() and any(options.output.iterdir()):
        raise ValueError(f"--output {options.output} holds something that is no artifact; it will not be replaced")
    if options.block_size < 1 or options.prefill_chunk < 1 or options.prefill_chunk % options.block_size:
        raise ValueError(
            f"--prefill-chunk {options.prefill_chunk} must be a positive multiple of --block-size {options.block_size}"
        )


def check_options(options: ExportOptions) -> None:
    """`check_output`, and ValueError when a backend can't build here what is asked of it."""
    check_output(options)
    for backend in options.backends:
        BACKENDS[backend].check_available(options.device, options.dtypes)


def write_artifact(
    make_model: Callable[[str], EarlyExitModel],
    tokenizer: Any,
    options: ExportOptions,
    report: Callable[[str], None] = lambda line: None,
) -> Path:
    """Build everything that `options` ask for and move it to `options.output`.

    Args:
        make_model: dtype → the early-exit model, base and heads in that dtype.
        tokenizer: saved beside the programs; None when the base has none.
        report: gets a line for each step.

    Raises:
        ValueError: the model can't be exported as asked.
        ParityError: a program does not compute what the model computes.
    """
    check_options(options)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    # Checked again before the move: building takes minutes, and others write too
    with whole_folder(options.output, before_move=lambda: check_output(options)) as folder:
        _write_contents(folder, make_model, tokenizer, options, report)
    return options.output


def _write_contents(
    folder: Path,
    make_model: Callable[[str], EarlyExitModel],
    tokenizer: Any,
    options: ExportOptions,
    report: Callable[[str], None],
) -> None:
    manifest: Manifest | None = None
    found: dict[str, dict[str, Any]] = {"programs": {}, "served": {}, "acceptance": {}}
    oracle = served_tokens.Oracle(lambda: _stock_base(make_model, options))
    with tempfile.TemporaryDirectory(prefix="hispec-graphs-") as scratch:
        for dtype in options.dtypes:
            model = make_model(dtype).place(options.device)
            if manifest is None:
                _check_space(folder, Path(scratch), model, options)
                manifest = _manifest(model, options)
                if options.promise is not None:
                    exits, family = [e.name for e in model.exits], model.family
                    acceptance.check_promise(options.promise, exits, family.vocab_size, family.max_positions)
                _write_base_files(folder, model, tokenizer)
            made = _export_graphs(model, make_model, dtype, Path(scratch), tokenizer, options, report)
            del model
            _release_memory()
            for backend in options.backends:
                programs = build_programs(backend, folder, made, manifest.limits, options, report)
                name = programs.build.folder_name
                calls = backends.load(Artifact(folder, manifest), programs)
                tiers, build = measure_programs(programs, calls, made, manifest, report)
                found["programs"][name] = [asdict(tier) for tier in tiers]
                artifact = record_set(folder, build, manifest)
                found["served"][name] = asdict(serve_programs(artifact, build, calls, made, oracle, report))
                if options.promise is not None:
                    kept = hold_acceptance(artifact, build, calls, made, options.promise, report)
                    found["acceptance"][name] = [asdict(one) for one in kept]
                del calls
                _release_memory()
    assert manifest is not None, options
    _write_json(folder / "parity.json", found | ({} if options.reference is None else {"reference": options.reference}))
    write_manifest(folder, manifest)


def _check_space(folder: Path, scratch: Path, model: EarlyExitModel, options: ExportOptions) -> None:
    """Every program's own weights: the base's and heads', the unembedding again where embeddings are tied, and its rows
    for each trimmed vocabulary."""
    family = model.family
    tied = family.unembedding.numel() if model.base.config.tie_word_embeddings else 0
    trimmed = sum(len(ids) for ids in model.draft_vocabs.values()) * family.exit_size
    numbers = sum(p.numel() for module in (model.base, model.heads) for p in module.parameters()) + tied + trimmed
    weights = [numbers * getattr(torch, dtype).itemsize for dtype in options.dtypes]
    check_space(folder, scratch, weights, options.backends)


def _stock_base(make_model: Callable[[str], EarlyExitModel], options: ExportOptions) -> transformers.PreTrainedModel:
    model = make_model("float32").place(options.device)
    model.family.use_attention("sdpa")
    return model.base


def _export_graphs(
    model: EarlyExitModel,
    make_model: Callable[[str], EarlyExitModel],
    dtype: str,
    scratch: Path,
    tokenizer: Any,
    options: ExportOptions,
    report: Callable[[str], None],
) -> Made:
    """Every program's graphs and weights under scratch/<dtype>/; and what the model itself computes."""
    start = time.perf_counter()
    rows = parity.calibration_rows(model.family.vocab_size, tokenizer)
    own = parity.reference_logits(model, rows)
    truth = own if dtype == "float32" else parity.reference_logits(make_model("float32").place(options.device), rows)
    reference = parity.make_reference(truth, own)
    graphs, programs = Graphs(scratch / dtype), list[Program]()
    forms: list[Form] = sorted({BACKENDS[backend].FORM for backend in options.backends})
    for form in forms:
        programs = make_programs(model, options.block_size, form, default_attention(form, options.device))
        for program in programs:
            graphs.write(program.name, form, export_program(program))
    kept = [replace(program, module=torch.nn.Identity()) for program in programs]  # lets the weights go
    report(f"{dtype}: exported {len(kept)} programs, {' and '.join(forms)}, in {time.perf_counter() - start:.0f} s")
    return Made(dtype=dtype, spans=tier_spans(model), programs=kept, graphs=graphs, rows=rows, reference=reference)


def _release_memory() -> None:
    """Give back what is no longer used, before others need it: graphs hold their weights, and runtimes their programs,
    in cycles, and glibc keeps what it was given back. 0.8 GB of SmolLM2-135M's in float32."""
    gc.collect()
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # other C libraries have none
        if trim is not None:
            trim(0)


# ---- records ----


def _manifest(model: EarlyExitModel, options: ExportOptions) -> Manifest:
    family, fingerprint = model.family, base_fingerprint(model.base)
    exits = [
        ExitInfo(
            name=e.name,
            layer=e.layer,
            head=e.head,
            vocab_size=model.num_exit_ids(e.name),
            has_kv=e.has_layer,
            context=e.context,
        )
        for e in model.exits
    ]
    exits.append(ExitInfo(name=TARGET, layer=family.num_layers, head="native", vocab_size=None, has_kv=False))
    return Manifest(
        base=BaseInfo(
            name=fingerprint["name"] or "",
            revision=fingerprint["revision"],
            config_sha256=fingerprint["config_sha256"] or "",
            family=family.name,
            num_layers=family.num_layers,
            hidden_size=family.hidden_size,
            exit_size=family.exit_size,
            vocab_size=family.vocab_size,
            num_kv_heads=family.num_kv_heads,
            head_dim=family.head_dim,
        ),
        tiers=[TierInfo(name=s.name, start=s.start, stop=s.stop, exit=s.name) for s in tier_spans(model)],
        exits=exits,
        dtypes=list(options.dtypes),
        block_size=options.block_size,
        limits=Limits(
            max_model_len=max_model_len(model, options.max_model_len),
            prefill_chunk=options.prefill_chunk,
            max_query_len=MAX_QUERY_LEN,
            max_batch=MAX_BATCH,
        ),
        eos_token_ids=model.eos_token_ids,
        provenance=_provenance(options.reference),
    )


def max_model_len(model: EarlyExitModel, asked: int | None) -> int:
    """The longest sequence: as asked, where the base's positions and sliding window allow it."""
    family = model.family
    allowed = min(family.max_positions, family.sliding_window or family.max_positions)
    if asked is None:
        return min(allowed, DEFAULT_MAX_MODEL_LEN)
    if not 1 < asked <= allowed:
        raise ValueError(
            f"--max-model-len {asked} must lie between 2 and {allowed}: the base has {family.max_positions} positions"
            + (f" and a sliding window of {family.sliding_window}" if family.sliding_window else "")
        )
    return asked


def _write_base_files(folder: Path, model: EarlyExitModel, tokenizer: Any) -> None:
    model.base.config.save_pretrained(folder)
    if model.base.generation_config is not None:
        model.base.generation_config.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    if model.draft_vocabs:
        save_file({n: ids.cpu().clone() for n, ids in model.draft_vocabs.items()}, folder / "draft_vocab.safetensors")


def _provenance(reference: dict[str, Any] | None) -> dict[str, Any]:
    """reference: of a model that is not the base as published; what programs are held to is that one."""
    return {
        **({} if reference is None else {"reference": reference}),
        "argv": list(sys.argv),
        "git": _git_commit(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }


def _git_commit() -> str | None:
    """The commit of this code, when it runs from a clone."""
    command: Sequence[str] = ("git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD")
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, allow_nan=False) + "\n")
