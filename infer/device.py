"""What programs can run on here: a device, the instructions that it knows, and packages beside PyTorch."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
from pathlib import Path

import torch

# By backend: packages beside PyTorch that run its programs. What a build.json names is looked for among these alone
RUNTIME_PACKAGES = {"onnx": ("onnx", "onnxruntime"), "tensorrt": ("tensorrt",)}
DISTRIBUTIONS = {  # of one module; others are called as their packages
    "onnxruntime": ("onnxruntime", "onnxruntime-gpu"),
    "tensorrt": ("tensorrt", "tensorrt-cu13", "tensorrt-cu12"),
}


def check_device(device: str) -> None:
    """ValueError unless programs can run on `device` here."""
    if device not in ("cpu", "cuda"):
        raise ValueError(f"device={device!r} must be 'cpu' or 'cuda' (choose one of several with CUDA_VISIBLE_DEVICES)")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device='cuda': PyTorch finds no GPU here; use device='cpu'")


def check_packages(backend: str, install: str, *names: str) -> None:
    """ValueError, with the command that installs them, when one of the packages of a backend is missing."""
    if missing := [name for name in names if importlib.util.find_spec(name) is None]:
        raise ValueError(
            f"backend={backend!r} needs {' and '.join(missing)}, not installed here: {install}, or use another backend"
        )


def missing_compiler(device: str) -> str:
    """What torch.compile lacks here to compile for `device`, and how to get it; empty if nothing."""
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        return f"the C++ compiler {compiler!r} is not on PATH: apt-get install g++, or set CXX to another compiler"
    if device == "cuda" and importlib.util.find_spec("triton") is None:
        return "triton, not installed here: pip install triton"
    return ""


def host_capability(device: str = "cpu") -> str:
    """The instruction set that machine code for `device` may use here."""
    if device == "cpu":
        # These have no level of their own there, but code that uses them dies where they are missing
        has_bf16, has_amx = torch.cpu._is_avx512_bf16_supported(), torch.cpu._is_amx_tile_supported()
        return torch.backends.cpu.get_cpu_capability() + "+BF16" * has_bf16 + "+AMX" * has_amx
    if not torch.cuda.is_available():
        return "no CUDA device"
    major, minor = torch.cuda.get_device_capability()
    return f"sm_{major}{minor}"


def gpu_name(device: str = "cuda") -> str | None:
    """What the maker calls the GPU that programs for `device` run on; None on CPU, and where there is no GPU."""
    return torch.cuda.get_device_name() if device == "cuda" and torch.cuda.is_available() else None


def processor_name(device: str = "cpu") -> str:
    """What the maker calls the processor that programs for `device` run on; where nobody says, its architecture."""
    if device != "cpu":
        return torch.cuda.get_device_name()
    cpuinfo = Path("/proc/cpuinfo")  # Linux's own; platform.processor() is empty or the architecture there
    lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def package_version(name: str) -> str | None:
    """Of one of RUNTIME_PACKAGES, as its distribution says: nothing is imported. None where it is not installed."""
    for distribution in DISTRIBUTIONS.get(name, (name,)):
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None
