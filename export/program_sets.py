"""One backend's programs: built in their folder, held to parity, and measured.

It decides nothing about models, nor how a backend builds.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from export import acceptance, bitwise, parity, served_tokens
from export.backends import BACKENDS
from export.backends.backend import BuildJob
from export.graphs import Graphs
from export.programs import Program, Span
from infer.artifact import Artifact, ProgramSet, write_manifest
from infer.device import gpu_name, host_capability, processor_name
from infer.draft_vocab import read_draft_vocabs
from infer.llm import LLM
from infer.manifest import BuildInfo, Limits, Manifest, ProgramInfo
from train.promise import Promise

if TYPE_CHECKING:
    from export.writer import ExportOptions


@dataclass(frozen=True, kw_only=True)
class Made:
    """One dtype's model after its programs have been exported."""

    dtype: str
    spans: list[Span]
    programs: list[Program]  # without their modules' weights being needed any more
    graphs: Graphs
    rows: list[torch.Tensor]
    reference: parity.Reference


def build_programs(
    backend: str,
    folder: Path,
    made: Made,
    limits: Limits,
    options: ExportOptions,
    report: Callable[[str], None],
) -> ProgramSet:
    """The programs of one backend and dtype in their folder."""
    module, start = BACKENDS[backend], time.perf_counter()
    build = BuildInfo(
        backend=backend,
        device=options.device,
        dtype=made.dtype,
        torch_version=torch.__version__,
        versions=module.versions(),
        machine=platform.machine(),
        cpu_capability=host_capability(options.device),
        gpu_name=gpu_name(options.device),
        processor=processor_name(options.device),
        num_threads=torch.get_num_threads(),
        programs={
            p.name: ProgramInfo(
                file=p.name + module.SUFFIX,
                kv_layers=list(p.kv_layers),
                bitwise_range=None,
                num_kernels={},
                weight_bytes=made.graphs.weights_file(p.name).stat().st_size,
            )
            for p in made.programs
        },
    )
    target = folder / "programs" / build.folder_name
    target.mkdir(parents=True)
    job = BuildJob(
        names=list(build.programs),
        graphs=made.graphs,
        folder=target,
        weights=folder / "weights" / made.dtype,
        device=options.device,
        dtype=made.dtype,
        limits=limits,
        autotune=options.autotune,
        num_threads=build.num_threads,
        num_workers=options.num_workers,
        cache=options.cache,
        report=lambda line: report(f"{made.dtype}: {line}"),
    )
    counted = module.build(job)
    report(f"{made.dtype}: built {backend} in {time.perf_counter() - start:.0f} s")
    infos = {name: replace(info, num_kernels=counted[name]) for name, info in build.programs.items()}
    return ProgramSet(target, replace(build, programs=infos))


def measure_programs(
    programs: ProgramSet,
    calls: dict[str, Callable[..., Any]],
    made: Made,
    manifest: Manifest,
    report: Callable[[str], None],
) -> tuple[list[parity.TierParity], BuildInfo]:
    """Hold programs, loaded as the runtime will, to parity, measure their bitwise ranges, write build.json."""
    start = time.perf_counter()
    base, infos, dtype = manifest.base, programs.build.programs, getattr(torch, made.dtype)
    caller = _caller(programs.build, calls, made, manifest)
    found = parity.check(caller, made.rows, made.reference, manifest.limits.max_batch)
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
    gaps = _slot_gaps(calls, made, manifest) if caller.device.type == "cpu" else []  # on a GPU nothing is known
    if gaps is None:  # no bits are promised that hang on how far a call reaches
        paged = {p.name for p in made.programs if p.kind != "flat"}
        measured |= {name: replace(measured[name], bitwise_range=None) for name in paged}
    build = replace(programs.build, programs=measured, slot_gaps=gaps or [])
    (programs.path / "build.json").write_text(build.to_json())
    ranges = {name: info.bitwise_range and "{}–{}".format(*info.bitwise_range) for name, info in measured.items()}
    seconds = time.perf_counter() - start
    report(f"{where}: same bits for {ranges} tokens, widths of tables left out: {gaps}; checked in {seconds:.0f} s")
    return found, build


def _slot_gaps(calls: dict[str, Callable[..., Any]], made: Made, manifest: Manifest) -> list[tuple[int, int]] | None:
    """`bitwise.slot_gaps` of the deepest trunk, whose layers show most."""
    base, dtype = manifest.base, getattr(torch, made.dtype)
    deepest = max((p for p in made.programs if p.kind == "trunk"), key=lambda p: len(p.kv_layers))
    return bitwise.slot_gaps(
        calls[deepest.name],
        _tokens(deepest, base.vocab_size, dtype),
        (manifest.block_size, base.num_kv_heads, base.head_dim),
        len(deepest.kv_layers),
        dtype,
        manifest.limits.max_model_len,
    )


def record_set(folder: Path, build: BuildInfo, manifest: Manifest) -> Artifact:
    """The folder as an artifact of these programs alone: to record and check all files for each set would take ever
    longer."""
    return Artifact(folder, write_manifest(folder, manifest, within=f"programs/{build.folder_name}"))


def serve_programs(
    artifact: Artifact,
    build: BuildInfo,
    calls: dict[str, Callable[..., Any]],
    made: Made,
    oracle: served_tokens.Oracle,
    report: Callable[[str], None],
) -> served_tokens.ServedTokens:
    """Hold the tokens that the runtime serves to plain decoding's, in fp32 to Hugging Face's."""
    start = time.perf_counter()
    prompts = served_tokens.calibration_prompts(made.rows, artifact.manifest)
    asked = oracle if made.dtype == "float32" else None  # elsewhere rounding decides
    served = served_tokens.check(artifact, build, calls, prompts, asked)
    who = ", ".join([*served.strategies, *(["transformers"] if asked else [])])
    report(
        f"{build.backend} {build.dtype}: the same {served.num_tokens} tokens by {who}; "
        f"checked in {time.perf_counter() - start:.0f} s"
    )
    return served


def hold_acceptance(
    artifact: Artifact,
    build: BuildInfo,
    calls: dict[str, Callable[..., Any]],
    made: Made,
    promise: Promise,
    report: Callable[[str], None],
) -> list[acceptance.Kept]:
    """Hold what exits are worth to the target to what validation promised."""
    start, manifest = time.perf_counter(), artifact.manifest

    def make_llm(num_blocks: int, max_num_seqs: int) -> LLM:
        return LLM(
            artifact,
            "layerskip",
            backend=build.backend,
            dtype=build.dtype,
            device=build.device,
            num_blocks=num_blocks,
            max_num_seqs=max_num_seqs,
            enforce_eager=True,
            programs=calls,
        )

    counter = acceptance.Counter(
        caller=_caller(build, calls, made, manifest),
        exits=manifest.exits[:-1],
        draft_vocabs=read_draft_vocabs(artifact, build.device),
        prefill_chunk=manifest.limits.prefill_chunk,
        max_model_len=manifest.limits.max_model_len,
    )
    where = f"{build.backend} {build.dtype}"
    found = acceptance.check(counter, make_llm, where, promise)
    for kept in found:
        report(
            f"{where}: {kept.exit} by {kept.by}, acceptance length {kept.found.length:.3f}, expected "
            f"{kept.expected.length:.3f}"
        )
    report(f"{where}: acceptance checked in {time.perf_counter() - start:.0f} s")
    return found


def _caller(build: BuildInfo, calls: dict[str, Callable[..., Any]], made: Made, manifest: Manifest) -> parity.Caller:
    return parity.Caller(
        programs=calls,
        infos=build.programs,
        spans=made.spans,
        contexts=[e.name for e in manifest.exits if e.context],
        block_size=manifest.block_size,
        num_kv_heads=manifest.base.num_kv_heads,
        head_dim=manifest.base.head_dim,
        dtype=getattr(torch, made.dtype),
        device=torch.device(build.device),
    )


def _tokens(program: Program, vocab_size: int, dtype: torch.dtype) -> torch.Tensor:
    """Arguments to try: token ids for the lowest trunk, hidden states above it."""
    example, shape = program.inputs[0], (bitwise.MAX_TOKENS, bitwise.MAX_TOKENS)
    if example.dtype == torch.long:
        return torch.randint(vocab_size, shape, generator=_generator())
    return torch.randn(*shape, example.shape[-1], generator=_generator()).to(dtype)


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)
