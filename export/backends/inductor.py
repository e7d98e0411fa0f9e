"""AOTInductor packages: the exported graph compiled ahead of time by the C++ compiler, weights inside.

Programs are compiled in processes of their own, each from the eager form on disk, so that several compile at once and
Inductor's caches end with them; finished packages are kept for the next export (`package_cache`). It knows nothing of
models; the traps that its options avoid stand in DESIGN §5.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
import zipfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch._inductor
import torch.utils._pytree as pytree
from safetensors import safe_open
from safetensors.torch import load_file
from torch._inductor.exc import InductorError
from torch.export import ExportedProgram

import infer.backends.eager
from export.attention import Form
from export.backends.backend import BuildJob
from export.cpu_kernels import attention, library, linear
from export.cpu_kernels.trial import try_products
from export.package_cache import PackageCache, conditions, file_sha256, key_of
from infer.backends.eager import read_graph
from infer.package import PROGRAM_KEY

SUFFIX = ".pt2"
FORM: Form = "kernel"
KERNELS = "kernels"  # folder of our own, for the linker
# What compiles, and what reads the graphs for it
_CODE = (Path(__file__), Path(infer.backends.eager.__file__), *library.sources())


@dataclass(frozen=True, kw_only=True)
class _Job:
    """One program to compile."""

    name: str
    graph_file: Path
    weights_file: Path
    package: Path
    device: str
    autotune: bool
    own_products: bool  # by our kernel for CPUs (`cpu_kernels.linear`), else Inductor chooses
    num_threads: int


def check_available(device: str, dtypes: Sequence[str]) -> None:
    """ValueError unless the C++ compiler that Inductor will call is there."""
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        raise ValueError(
            f"backend inductor compiles C++ and {compiler!r} is not on PATH: install it (apt-get install g++), "
            "set CXX to another compiler, or export with --backend eager"
        )
    if device == "cpu" and "clang" in subprocess.run([compiler, "--version"], capture_output=True, text=True).stdout:
        raise ValueError(
            f"backend inductor compiles kernels of ours (export/cpu_kernels) that only GCC takes, and CXX={compiler!r} "
            "is clang: leave CXX out or name g++, or export with --backend eager"
        )


def options(device: str, autotune: bool) -> dict[str, Any]:
    """Inductor's settings. On CPU, freezing stores each weight in the order in which oneDNN reads it, and joins the
    matrices that read one input (q, k, v; gate, up) in one product. On CUDA, products are Triton templates: one kernel
    with one order of sums for any number of tokens, where cuBLAS changes it with the shape."""
    chosen: dict[str, Any] = {"aot_inductor.check_lowerbound": False}
    if device == "cuda":
        return chosen | {"max_autotune": True, "max_autotune_gemm_backends": "TRITON"}
    chosen |= {"freezing": True, "cpp.enable_concat_linear": True}
    if autotune:
        chosen |= {"max_autotune": True, "max_autotune_gemm_backends": "CPP,ATEN"}
    return chosen


def kernels(device: str) -> dict[str, Any]:
    """Inductor's settings by which packages call our own kernels on CPU; the linker finds them (`library`)."""
    if device != "cpu":
        return {}
    ours = torch.ops.hispec
    return {
        "aot_inductor.custom_op_libs": [library.ARCHIVE],
        "aot_inductor.custom_ops_to_c_shims": {
            ours.paged_attention_cpu.default: [attention.SHIM],
            ours.linear_cpu.default: [linear.SHIM],
        },
    }


def versions() -> dict[str, str]:
    return {}


def build(job: BuildJob) -> dict[str, dict[str, int]]:
    """Compile every program to a package, and count its kernels."""
    own_products = job.device == "cpu" and _own_products_pay(job)
    jobs = [
        _Job(
            name=name,
            graph_file=job.graphs.graph_file(name, FORM),
            weights_file=job.graphs.weights_file(name),
            package=job.folder / f"{name}{SUFFIX}",
            device=job.device,
            autotune=job.autotune and job.dtype != "float32",  # there the templates lose: BENCHMARKS.md
            own_products=own_products,
            num_threads=job.num_threads,
        )
        for name in job.names
    ]
    keys = _keys(jobs, job)
    taken = [one for one in jobs if one.name in keys and _take(job, keys[one.name], one.package)]
    if taken:
        job.report(f"{len(taken)} of {len(jobs)} packages as an earlier export has compiled them, from {job.cache}")
    packages = {one.name: one.package for one in jobs}
    for name, seconds, fault in _compile_all([one for one in jobs if one not in taken], job.num_workers):
        job.report(f"compiled {name} in {seconds:.0f} s")
        if fault:
            job.report(f"{name} has Inductor's own kernels, as autotuning it failed: {fault}")
        if name in keys:
            _keep(job, keys[name], packages[name])
    return {one.name: count_kernels(one.package) for one in jobs}


def _own_products_pay(job: BuildJob) -> bool:
    """By a trial on the matrices of the program that has most of them."""
    found = [_matrices(job.graphs.weights_file(name)) for name in job.names]
    trial = try_products(max(found, key=lambda shapes: sum(n * k for n, k in shapes)), getattr(torch, job.dtype))
    job.report(f"our products with weights take {trial}: {'chosen' if trial.pays else 'the library is faster'}")
    return trial.pays


def _matrices(file: Path) -> list[tuple[int, int]]:
    """Shapes of the stored matrices that a program multiplies with; embeddings are looked up in."""
    with safe_open(file, "np") as weights:
        names = [name for name in list(weights.keys()) if not name.startswith("embedding.")]
        shapes = [tuple(weights.get_slice(name).get_shape()) for name in names]
    return [shape for shape in shapes if len(shape) == 2]


def _take(job: BuildJob, key: str, package: Path) -> bool:
    """From the cache; a cache that fails costs a compilation, not the export."""
    assert job.cache is not None, key
    try:
        return PackageCache(job.cache).take(key, package)
    except OSError as error:
        job.report(f"{package.name} is not taken from the cache of compiled packages: {error}")
        return False


def _keep(job: BuildJob, key: str, package: Path) -> None:
    """In the cache, if it can be kept."""
    assert job.cache is not None, key
    try:
        PackageCache(job.cache).keep(key, package)
    except OSError as error:
        job.report(f"{package.name} is not kept in the cache of compiled packages: {error}")


def _keys(jobs: Sequence[_Job], job: BuildJob) -> dict[str, str]:
    """Program → what its package is kept under; none where the cache can't be used, or kernels are chosen by trial: a
    choice that another process has spoilt would stay."""
    if job.cache is None or job.device == "cuda" or any(one.autotune for one in jobs):
        return {}
    if fault := PackageCache(job.cache).fault():
        job.report(f"no cache of compiled packages: {fault}")
        return {}
    shared = conditions() | {
        "code": [file_sha256(file) for file in _CODE],
        "metadata": PROGRAM_KEY,
        "options": options(job.device, autotune=False),
    }
    return {
        one.name: key_of(
            shared
            | {"name": one.name, "device": one.device, "threads": one.num_threads, "own_products": one.own_products},
            [one.graph_file, one.weights_file],
        )
        for one in jobs
    }


def _compile_all(jobs: Sequence[_Job], num_workers: int) -> Iterator[tuple[str, float, str]]:
    """Compile all jobs, largest first, `num_workers` at a time; yields (name, seconds, why autotuning failed) as they
    end."""
    if not jobs:
        return
    largest_first = sorted(jobs, key=lambda job: -job.weights_file.stat().st_size)
    spawn = multiprocessing.get_context("spawn")  # torch's threads don't survive a fork
    with (
        tempfile.TemporaryDirectory(prefix="hispec-inductor-") as cache,
        ProcessPoolExecutor(num_workers, mp_context=spawn, initializer=os.setpgrp) as pool,
    ):
        try:
            if any(job.device == "cpu" for job in jobs):
                library.build_archive(Path(cache) / KERNELS)
            for done in as_completed([pool.submit(_compile, job, cache) for job in largest_first]):
                yield done.result()
        except BaseException:
            _stop(pool)
            raise


def _stop(pool: ProcessPoolExecutor) -> None:
    """End the workers and the compilers that they have started, for which leaving the pool would wait."""
    for pid, process in list((pool._processes or {}).items()):
        try:
            os.killpg(pid, signal.SIGTERM)  # each is the first of its group (`initializer`)
        except ProcessLookupError:  # not yet
            process.terminate()


def _compile(job: _Job, cache: str) -> tuple[str, float, str]:
    start = time.perf_counter()
    # Its own: Inductor names files by their code, and two unembeddings compiled at once, alike but for their weights,
    # would write to the same ones
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path(cache) / job.name)
    torch.set_num_threads(job.num_threads)
    if job.device == "cpu":
        library.link_from(Path(cache) / KERNELS)
    fault = ""
    try:
        _write_package(job, job.autotune)
    except InductorError as error:  # torch 2.13 asserts without a word while it times templates for some products
        if not job.autotune or job.device == "cuda":  # there templates are what keeps bits equal
            raise
        fault = str(error).strip().splitlines()[0]
        _write_package(job, autotune=False)
    return job.name, time.perf_counter() - start, fault


def _write_package(job: _Job, autotune: bool) -> None:
    # Clones: a package would store the whole mapped file behind every tensor that is a view of it
    tensors = {name: tensor.clone() for name, tensor in load_file(job.weights_file, job.device).items()}
    exported = read_graph(job.graph_file, tensors)
    exported._example_inputs = example_inputs(exported)
    if job.own_products:
        linear.use_linear(exported)
    with torch.no_grad():  # else Inductor ignores `freezing`, silently
        torch._inductor.aoti_compile_and_package(
            exported,
            package_path=str(job.package),
            inductor_configs=options(job.device, autotune)
            | kernels(job.device)
            | {"aot_inductor.metadata": {PROGRAM_KEY: job.name}},
        )


def example_inputs(exported: ExportedProgram) -> Any:
    """(args, kwargs) of the shapes that the graph was exported with, every tensor independent of the others."""
    names = set(exported.graph_signature.user_inputs)
    values = [node.meta["val"] for node in exported.graph.nodes if node.op == "placeholder" and node.name in names]
    tensors = [torch.zeros([_hint(n) for n in v.shape], dtype=v.dtype, device=v.device) for v in values]
    return pytree.tree_unflatten(tensors, exported.call_spec.in_spec)


def _hint(size: int | torch.SymInt) -> int:
    """The number that stood in the example for a dynamic dimension."""
    return size if isinstance(size, int) else int(size.node.hint)


def count_kernels(package: Path) -> dict[str, int]:
    """How a package multiplies matrices: calls of library GEMMs on plain and on packed weights, templates with AMX."""
    with zipfile.ZipFile(package) as archive:
        sources = [archive.read(name).decode() for name in archive.namelist() if name.endswith(".cpp")]
    text = "\n".join(sources)
    return {
        "library_gemm": len(re.findall(r"aoti_torch_cpu_(?:mm|addmm|bmm|linear)(?:_out)?\(", text)),
        "packed_gemm": len(re.findall(r"aoti_torch_cpu_\w*linear_pointwise\w*\(", text)),
        "amx_template": len(re.findall(r"^\s*AMXState amx_state;", text, flags=re.MULTILINE)),
        # Where they are called they are declared once, too
        "linear": max(0, text.count("aoti_torch_cpu_linear_cpu(") - 1),
        "attention": max(0, text.count("aoti_torch_cpu_paged_attention_cpu(") - 1),
    }
