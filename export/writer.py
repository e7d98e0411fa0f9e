"""Writes an artifact: every program, its measurements and the records, into a folder that appears whole or not at all.

It decides nothing about models or compilers; it is the list of steps in order.
"""

from __future__ import annotations

import json
import platform
import shutil
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

from export import bitwise, parity
from export.attention import default_attention
from export.backends import eager, inductor
from export.programs import TARGET, Program, Span, export_program, make_programs, tier_spans
from infer import backends
from infer.artifact import Artifact, ProgramSet, write_manifest
from infer.batch import RING_SIZE
from infer.device import host_capability
from infer.manifest import BaseInfo, BuildInfo, ExitInfo, Limits, Manifest, ProgramInfo, TierInfo
from train.base_model import base_fingerprint
from train.model import EarlyExitModel
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


@dataclass(frozen=True, kw_only=True)
class _Made:
    """One dtype's model after its programs have been exported and saved in the eager form."""

    dtype: str
    spans: list[Span]
    programs: list[Program]  # without their modules' weights being needed any more
    rows: list[torch.Tensor]
    reference: parity.Reference


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
    check_output(options)
    if "inductor" in options.backends:
        inductor.check_compiler()
    options.output.parent.mkdir(parents=True, exist_ok=True)
    # Checked again before the move: building takes minutes, and others write too
    with whole_folder(options.output, before_move=lambda: check_output(options)) as folder:
        manifest = _write_contents(folder, make_model, tokenizer, options, report)
        write_manifest(folder, manifest)
    return options.output


def _write_contents(
    folder: Path,
    make_model: Callable[[str], EarlyExitModel],
    tokenizer: Any,
    options: ExportOptions,
    report: Callable[[str], None],
) -> Manifest:
    manifest: Manifest | None = None
    parities: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory(prefix="hispec-graphs-") as scratch:
        for dtype in options.dtypes:
            model = make_model(dtype).place(options.device)
            if manifest is None:
                manifest = _manifest(model, options)
                _write_base_files(folder, model, tokenizer)
            made = _export_graphs(model, make_model, dtype, Path(scratch), tokenizer, options, report)
            del model
            for backend in options.backends:
                programs = _build(backend, folder, Path(scratch), made, options, report)
                found = _measure(folder, programs, made, manifest, report)
                parities[programs.build.folder_name] = [asdict(tier) for tier in found]
    assert manifest is not None, options
    _write_json(folder / "parity.json", {"programs": parities})
    return manifest


# ---- steps ----


def _export_graphs(
    model: EarlyExitModel,
    make_model: Callable[[str], EarlyExitModel],
    dtype: str,
    scratch: Path,
    tokenizer: Any,
    options: ExportOptions,
    report: Callable[[str], None],
) -> _Made:
    """Every program's graph and weights under scratch/<dtype>/; and what the model itself computes."""
    start = time.perf_counter()
    rows = parity.calibration_rows(model.family.vocab_size, tokenizer)
    own = parity.reference_logits(model, rows)
    truth = own if dtype == "float32" else parity.reference_logits(make_model("float32").place(options.device), rows)
    reference = parity.make_reference(truth, own)
    (scratch / dtype).mkdir()
    programs = []
    for program in make_programs(model, options.block_size, default_attention(options.device)):
        graph, weights = _graph_files(scratch, dtype, program.name)
        eager.build(export_program(program), graph, weights)
        programs.append(replace(program, module=torch.nn.Identity()))  # lets the weights go
    report(f"{dtype}: exported {len(programs)} programs in {time.perf_counter() - start:.0f} s")
    return _Made(dtype=dtype, spans=tier_spans(model), programs=programs, rows=rows, reference=reference)


def _build(
    backend: str, folder: Path, scratch: Path, made: _Made, options: ExportOptions, report: Callable[[str], None]
) -> ProgramSet:
    """The programs of one backend and dtype in their folder."""
    suffix = {"eager": eager.SUFFIX, "inductor": inductor.SUFFIX}[backend]
    build = BuildInfo(
        backend=backend,
        device=options.device,
        dtype=made.dtype,
        torch_version=torch.__version__,
        machine=platform.machine(),
        cpu_capability=host_capability(options.device),
        num_threads=torch.get_num_threads(),
        programs={
            p.name: ProgramInfo(file=p.name + suffix, kv_layers=list(p.kv_layers), bitwise_range=None, num_kernels={})
            for p in made.programs
        },
    )
    target = folder / "programs" / build.folder_name
    target.mkdir(parents=True)
    if backend == "eager":
        (folder / "weights" / made.dtype).mkdir(parents=True)
        for program in made.programs:
            graph, weights = _graph_files(scratch, made.dtype, program.name)
            shutil.copy(graph, target / graph.name)
            shutil.copy(weights, folder / "weights" / made.dtype / weights.name)
        return ProgramSet(target, build)
    jobs = [
        inductor.Job(
            name=p.name,
            graph_file=_graph_files(scratch, made.dtype, p.name)[0],
            weights_file=_graph_files(scratch, made.dtype, p.name)[1],
            package=target / build.programs[p.name].file,
            device=options.device,
            autotune=options.autotune and made.dtype != "float32",  # there the templates lose: BENCHMARKS.md
            num_threads=build.num_threads,
        )
        for p in made.programs
    ]
    start = time.perf_counter()
    for name, seconds in inductor.build(jobs, options.num_workers):
        report(f"{made.dtype}: compiled {name} in {seconds:.0f} s")
    report(f"{made.dtype}: compiled all in {time.perf_counter() - start:.0f} s")
    counted = {
        name: replace(info, num_kernels=inductor.count_kernels(target / info.file))
        for name, info in build.programs.items()
    }
    return ProgramSet(target, replace(build, programs=counted))


def _measure(
    folder: Path, programs: ProgramSet, made: _Made, manifest: Manifest, report: Callable[[str], None]
) -> list[parity.TierParity]:
    """Load the programs as the runtime will, hold them to parity, measure their bitwise ranges, write build.json."""
    start = time.perf_counter()
    calls = backends.load(Artifact(folder, manifest), programs)
    base, infos, dtype = manifest.base, programs.build.programs, getattr(torch, made.dtype)
    caller = parity.Caller(
        programs=calls,
        infos=infos,
        spans=made.spans,
        contexts=[e.name for e in manifest.exits if e.context],
        block_size=manifest.block_size,
        num_kv_heads=base.num_kv_heads,
        head_dim=base.head_dim,
        dtype=dtype,
        device=torch.device(programs.build.device),
    )
    found = parity.check(caller, made.rows, made.reference)
    where = f"{programs.build.backend} {made.dtype}"
    for tier in found:
        report(f"{where}: {tier.tier} error {tier.max_error:.1e}, top-1 agreement {tier.top1_agreement:.1%}")
    page_shape = (manifest.block_size, base.num_kv_heads, base.head_dim)
    measured = {}
    for p in made.programs:
        if p.kind == "flat":
            states = torch.randn(bitwise.MAX_TOKENS, p.inputs[0].shape[-1], generator=_generator())
            limits = bitwise.flat_range(calls[p.name], states.to(caller.device, dtype))
        else:
            tokens = _tokens(p, base.vocab_size, dtype).to(caller.device)
            limits = bitwise.paged_range(calls[p.name], tokens, page_shape, len(p.kv_layers), dtype)
        measured[p.name] = replace(infos[p.name], bitwise_range=limits)
    (programs.path / "build.json").write_text(replace(programs.build, programs=measured).to_json())
    ranges = {name: info.bitwise_range and "{}–{}".format(*info.bitwise_range) for name, info in measured.items()}
    report(f"{where}: same bits for {ranges} tokens; checked in {time.perf_counter() - start:.0f} s")
    return found


def _tokens(program: Program, vocab_size: int, dtype: torch.dtype) -> torch.Tensor:
    """Arguments to try: token ids for the lowest trunk, hidden states above it."""
    example, shape = program.inputs[0], (bitwise.MAX_TOKENS, bitwise.MAX_TOKENS)
    if example.dtype == torch.long:
        return torch.randint(vocab_size, shape, generator=_generator())
    return torch.randn(*shape, example.shape[-1], generator=_generator()).to(dtype)


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def _graph_files(scratch: Path, dtype: str, name: str) -> tuple[Path, Path]:
    return scratch / dtype / f"{name}{eager.SUFFIX}", scratch / dtype / f"{name}.safetensors"


# ---- records ----


def _manifest(model: EarlyExitModel, options: ExportOptions) -> Manifest:
    family, fingerprint = model.family, base_fingerprint(model.base)
    exits = [
        ExitInfo(
            name=e.name,
            layer=e.layer,
            head=e.head,
            vocab_size=len(model.draft_vocabs[e.name]) if e.name in model.draft_vocabs else None,
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
        provenance=_provenance(),
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
        save_file({n: ids.cpu() for n, ids in model.draft_vocabs.items()}, folder / "draft_vocab.safetensors")


def _provenance() -> dict[str, Any]:
    return {
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
