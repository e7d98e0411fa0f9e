"""TensorRT engines, run by TensorRT's own runtime, called as the other backends' programs are.

An engine is the functional form of a program with its weights inside, a plan for one GPU model and one TensorRT: one
built elsewhere is refused by its build.json before a byte of it is read (`BuildInfo.misfits`). It is no pickle and
needs no torch-tensorrt, but it holds machine code, and unlike other programs not the name of its program: of swapped
ones with right hashes only a wrong number of pages is noticed.

Written without a GPU at hand: never run on one yet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from infer.artifact import Artifact, ProgramSet
from infer.backends.functional import FlatCall, PagedCall
from infer.device import check_device, check_packages
from infer.manifest import EXPORT_AGAIN

INSTALL = "pip install 'hispec[tensorrt]'"
QUERY_INPUTS = ("positions", "slots", "block_table")  # behind x, whatever that is called; then kv_0, kv_1, …
ALIGNMENT = 256  # bytes: PyTorch's allocations have it, a slice of one may not


def load_programs(artifact: Artifact, program_set: ProgramSet) -> dict[str, Callable[..., Any]]:
    """Program name → a call over an engine.

    Raises:
        ValueError: TensorRT or the GPU is missing, or a file is no engine of its program.
    """
    check_packages("tensorrt", INSTALL, "tensorrt")
    check_device(program_set.build.device)
    import tensorrt

    runtime = tensorrt.Runtime(tensorrt.Logger(tensorrt.Logger.ERROR))
    stream = torch.cuda.Stream()
    calls = dict[str, Callable[..., Any]]()
    for name, program in program_set.build.programs.items():
        engine = _Engine(runtime, program_set.path / program.file, 2 * len(program.kv_layers), stream)
        calls[name] = PagedCall(engine) if program.kv_layers else FlatCall(engine)
    return calls


class _Engine:
    """An engine that reads and writes PyTorch's memory.

    All engines run on one stream of their own, since TensorRT waits for the device on the default one. It begins after
    what the caller's stream has been given and the caller's goes on after it, so that memory which PyTorch frees in
    between is not used again too early.
    """

    def __init__(self, runtime: Any, engine_file: Path, num_pages: int, stream: torch.cuda.Stream) -> None:
        import tensorrt

        self._file, self._stream = engine_file, stream
        self._engine = runtime.deserialize_cuda_engine(engine_file.read_bytes())
        if self._engine is None:
            raise ValueError(
                f"{engine_file}: TensorRT {tensorrt.__version__} can't load it (its log says why); {EXPORT_AGAIN}"
            )
        names = [self._engine.get_tensor_name(i) for i in range(self._engine.num_io_tensors)]
        is_input = {name: self._engine.get_tensor_mode(name) == tensorrt.TensorIOMode.INPUT for name in names}
        self._inputs = self._in_order([name for name in names if is_input[name]], num_pages)
        self._outputs = [f"output{i}" for i in range(1 + num_pages)]  # as torch-tensorrt names them
        if found := {name for name in names if not is_input[name]} ^ set(self._outputs):
            raise ValueError(f"{engine_file}: outputs {sorted(found)} too few or too many; {EXPORT_AGAIN}")
        self.width: int = self._engine.get_tensor_shape(self._outputs[0])[-1]
        # Memory comes with each call: for the largest shapes that the engine takes it would be gigabytes, always
        self._context = self._engine.create_execution_context(tensorrt.ExecutionContextAllocationStrategy.USER_MANAGED)
        if self._context is None:
            raise ValueError(f"{engine_file}: TensorRT can't run it here (its log says why): free memory on the GPU")

    def _in_order(self, found: Sequence[str], num_pages: int) -> list[str]:
        """TensorRT promises no order of what it lists, and keys and values have one shape."""
        rest = [*QUERY_INPUTS, *(f"kv_{i}" for i in range(num_pages))] if num_pages else []
        first = [name for name in found if name not in rest]
        if len(first) != 1 or len(found) != 1 + len(rest):
            raise ValueError(
                f"{self._file}: takes {sorted(found)}, expected a first tensor and {rest}: another program; "
                f"{EXPORT_AGAIN}"
            )
        return first + rest

    def run(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        """Read `inputs` and fill `outputs`, all contiguous and of the engine's dtypes and shapes, in its order.

        ValueError when a shape lies outside of what the engine was built for.
        """
        context = self._context
        inputs = [tensor if tensor.data_ptr() % ALIGNMENT == 0 else tensor.clone() for tensor in inputs]
        for name, tensor in zip(self._inputs, inputs, strict=True):
            assert tensor.is_contiguous(), (name, tensor.shape, tensor.stride())
            if not context.set_input_shape(name, tuple(tensor.shape)):
                least, _, most = self._engine.get_tensor_profile_shape(name, 0)
                raise ValueError(
                    f"{self._file}: {name} of shape {tuple(tensor.shape)}, built for {tuple(least)} to {tuple(most)}: "
                    "use fewer num_blocks or a smaller max_num_seqs, or export with a larger --max-model-len"
                )
        for name, tensor in zip((*self._inputs, *self._outputs), (*inputs, *outputs), strict=True):
            context.set_tensor_address(name, tensor.data_ptr())
        size = context.update_device_memory_size_for_shapes()
        memory = torch.empty(size, dtype=torch.uint8, device=outputs[0].device)
        context.set_device_memory(memory.data_ptr(), size)
        caller = torch.cuda.current_stream()
        self._stream.wait_stream(caller)
        is_queued = context.execute_async_v3(self._stream.cuda_stream)
        caller.wait_stream(self._stream)
        if not is_queued:
            raise RuntimeError(f"{self._file}: TensorRT could not run it (its log says why)")
