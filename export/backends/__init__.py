"""Ways to build programs, one file each; `infer.backends` has the loading side under the same names."""

from export.backends import eager, inductor, onnx, tensorrt
from export.backends.backend import Backend

BACKENDS: dict[str, Backend] = {"eager": eager, "inductor": inductor, "onnx": onnx, "tensorrt": tensorrt}
