"""Stand-ins for TensorRT's runtime and for torch-tensorrt, as far as we call them; what they are asked for is kept.

An engine's bytes name a module in `PLANS`, which is run over the memory at the addresses that were bound.
"""

import ctypes
import math
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

VERSION = "11.0.0.114"
ALIGNMENT = 64  # bytes, of PyTorch's allocations on CPU; on GPUs they have TensorRT's 256


class Plan(NamedTuple):
    run: Callable[[list[Tensor]], list[Tensor]]
    inputs: dict[str, torch.dtype]  # in the program's order
    outputs: dict[str, torch.dtype]
    width: int
    most: int = 1 << 20  # of any dimension


PLANS: dict[bytes, Plan] = {}


def at_address(address: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    content = (ctypes.c_char * (math.prod(shape) * dtype.itemsize)).from_address(address)
    return torch.frombuffer(content, dtype=dtype).view(shape)


class Context:
    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._addresses: dict[str, int] = {}
        self._memory: tuple[int, int] | None = None

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        self._shapes[name] = shape
        return name in self._plan.inputs and max(shape) <= self._plan.most

    def set_tensor_address(self, name: str, address: int) -> bool:
        assert address % ALIGNMENT == 0, name
        self._addresses[name] = address
        return True

    def update_device_memory_size_for_shapes(self) -> int:
        assert self._shapes.keys() == self._plan.inputs.keys()
        return 4096

    def set_device_memory(self, address: int, size: int) -> None:
        self._memory = (address, size)

    def execute_async_v3(self, stream_handle: int) -> bool:
        assert stream_handle == 7, "not the stream that the loader made"
        assert self._memory is not None and self._memory[1] == 4096
        plan = self._plan
        given = [at_address(self._addresses[n], self._shapes[n], dtype) for n, dtype in plan.inputs.items()]
        for (name, dtype), result in zip(plan.outputs.items(), plan.run(given), strict=True):
            at_address(self._addresses[name], tuple(result.shape), dtype).copy_(result)
        return True


class Engine:
    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._names = sorted({**plan.inputs, **plan.outputs}, reverse=True)  # in no order that one could rely on
        self.num_io_tensors = len(self._names)

    def get_tensor_name(self, index: int) -> str:
        return self._names[index]

    def get_tensor_mode(self, name: str) -> str:
        return "INPUT" if name in self._plan.inputs else "OUTPUT"

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return (-1, -1, self._plan.width)

    def get_tensor_profile_shape(self, name: str, profile: int) -> list[tuple[int, ...]]:
        return [(1,), (1,), (self._plan.most,)]

    def create_execution_context(self, strategy: str) -> Context:
        assert strategy == "USER_MANAGED"
        return Context(self._plan)


class Runtime:
    def __init__(self, logger: Any) -> None:
        pass

    def deserialize_cuda_engine(self, content: bytes) -> Engine | None:
        return Engine(PLANS[content]) if content in PLANS else None


def _module(name: str, **members: Any) -> ModuleType:
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    module.__dict__.update(members)
    return module


def install_runtime(patch: pytest.MonkeyPatch) -> None:
    """A TensorRT and a GPU whose memory is the CPU's."""
    logger = type("Logger", (), {"ERROR": 1, "__init__": lambda self, level: None})
    fake = _module(
        "tensorrt",
        __version__=VERSION,
        Logger=logger,
        Runtime=Runtime,
        TensorIOMode=SimpleNamespace(INPUT="INPUT", OUTPUT="OUTPUT"),
        ExecutionContextAllocationStrategy=SimpleNamespace(USER_MANAGED="USER_MANAGED"),
    )
    patch.setitem(sys.modules, "tensorrt", fake)
    patch.setattr("infer.backends.tensorrt.ALIGNMENT", ALIGNMENT)
    stream = SimpleNamespace(cuda_stream=7, wait_stream=lambda other: None)
    patch.setattr("torch.cuda.is_available", lambda: True)
    patch.setattr("torch.cuda.get_device_capability", lambda: (9, 0))
    patch.setattr("torch.cuda.get_device_name", lambda: "NVIDIA H100")
    patch.setattr("torch.cuda.Stream", lambda: stream)
    patch.setattr("torch.cuda.current_stream", lambda: SimpleNamespace(cuda_stream=0, wait_stream=lambda other: None))


def install_compiler(patch: pytest.MonkeyPatch, convert: Callable[..., bytes]) -> None:
    """A torch-tensorrt that compiles by `convert`."""
    fake = _module(
        "torch_tensorrt",
        Input=lambda **shapes: SimpleNamespace(**shapes),
        dynamo=SimpleNamespace(convert_exported_program_to_serialized_trt_engine=convert),
    )
    patch.setitem(sys.modules, "torch_tensorrt", fake)
