"""The Triton kernel: on CPU in Triton's interpreter, on a GPU as it is. The cases stand in `triton_cases`.

Whether a kernel is interpreted is settled when triton is first imported, so the cases run in a process of their own.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from export.attention import attention_name, default_attention
from infer.backends.eager import read_graph

CASES = Path(__file__).with_name("triton_cases.py")
ROOT = CASES.parents[2]


def run_cases(marks: str, *options: str, interpret: bool) -> None:
    command = [sys.executable, "-m", "pytest", str(CASES), "-q", "-m", marks, "-p", "no:cacheprovider", *options]
    environment = os.environ | {"TRITON_INTERPRET": str(int(interpret))}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


def test_kernel_in_tritons_interpreter() -> None:
    pytest.importorskip("triton", reason="needs the package triton: pip install -c constraints.txt triton")
    run_cases("not slow", interpret=True)


@pytest.mark.slow
def test_kernel_in_tritons_interpreter_at_every_shape() -> None:
    pytest.importorskip("triton", reason="needs the package triton: pip install -c constraints.txt triton")
    run_cases("slow", interpret=True)


@pytest.mark.gpu
def test_kernel_on_the_gpu() -> None:
    pytest.importorskip("triton", reason="needs the package triton: pip install -c constraints.txt triton")
    run_cases("slow or not slow", "--device", "cuda", interpret=False)


SIZES = [
    ("bf16", 128, 90),
    pytest.param("bf16", 64, 80, marks=pytest.mark.slow),
    pytest.param("fp32", 128, 80, marks=pytest.mark.slow),
    pytest.param("fp32", 256, 90, marks=pytest.mark.slow),  # half a minute
]


@pytest.mark.parametrize(("dtype", "head_dim", "capability"), SIZES)
def test_kernel_compiles_for_gpus_without_one(dtype: str, head_dim: int, capability: int) -> None:
    """The interpreter lets through what the compiler refuses. Shared memory: the least of any GPU since sm_80."""
    pytest.importorskip("triton", reason="needs the package triton: pip install -c constraints.txt triton")
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from infer.triton_attention import _kernel, constants_of

    constants = constants_of(head_dim, {"bf16": 2, "fp32": 4}[dtype]) | {
        "NUM_KV_HEADS": 8, "GROUPS": 3, "BLOCK_SIZE": 16, "HEAD_DIM": head_dim,
    }  # fmt: skip
    kinds = {"block_table": "*i64", "positions": "*i64", "scale": "fp32", "length": "i32", "max_blocks": "i32"}
    kinds |= dict.fromkeys(constants, "constexpr")
    names = _kernel.arg_names
    source = ASTSource(
        _kernel,
        {name: kinds.get(name, f"*{dtype}") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(number,): [["tt.divisibility", 16]] for number in range(6)},  # as PyTorch's tensors are
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32))
    assert compiled.metadata.shared <= 99 * 1024
    if dtype == "bf16":
        assert "mma.sync" in compiled.asm["ptx"]


def test_the_form_is_chosen_by_device_and_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert default_attention("kernel", "cuda") == default_attention("inplace", "cpu") == "portable"
    with pytest.raises(ValueError, match="pip install triton"):
        attention_name("triton")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    assert default_attention("kernel", "cuda") == default_attention("inplace", "cuda") == "triton"
    assert (default_attention("kernel", "cpu"), default_attention("inplace", "cpu")) == ("cpp", "portable")
    assert {default_attention("functional", device) for device in ("cpu", "cuda")} == {"portable"}
    assert len({attention_name(name) for name in ("portable", "triton", "cpp")}) == 3
    with pytest.raises(ValueError, match="expected portable, triton or cpp"):
        attention_name("flash")  # type: ignore[arg-type]


def test_a_graph_with_the_kernel_is_refused_without_triton(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    graph = tmp_path / "draft.trunk.graph.json"
    graph.write_text(
        '{"graph_module": {"signature": {"input_specs": []}, "target": "torch.ops.hispec.paged_attention.default"}}'
    )
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"draft.trunk.graph.json: .* pip install triton"):
        read_graph(graph, {})
