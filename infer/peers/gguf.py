"""A GGUF file with all weights in one dtype, so that llama.cpp computes with the very numbers that we do:
`python -m infer.peers.gguf SOURCE TARGET --dtype bfloat16`.

transformers dequantises a quantised GGUF when it loads it; so does this, by the same package, and writes them whole.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import gguf
import numpy as np

TYPES = {"float32": gguf.GGMLQuantizationType.F32, "bfloat16": gguf.GGMLQuantizationType.BF16}
FILE_TYPES = {"float32": gguf.LlamaFileType.ALL_F32, "bfloat16": gguf.LlamaFileType.MOSTLY_BF16}


def write(source: Path, target: Path, dtype: str) -> None:
    """Copy metadata and tensors; matrices in `dtype`, vectors (norms, biases) in float32, as llama.cpp's own files."""
    reader = gguf.GGUFReader(source)
    architecture = reader.get_field(gguf.Keys.General.ARCHITECTURE)
    assert architecture is not None
    temporary = target.with_name(f".{target.name}")
    writer = gguf.GGUFWriter(temporary, architecture.contents())
    own = {gguf.Keys.General.ARCHITECTURE, gguf.Keys.General.FILE_TYPE, gguf.Keys.General.QUANTIZATION_VERSION}
    for name, field in reader.fields.items():
        if name not in own and not name.startswith("GGUF."):
            sub_type = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], sub_type)
    writer.add_file_type(FILE_TYPES[dtype])
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        kind = TYPES["float32"] if values.ndim < 2 else TYPES[dtype]
        writer.add_tensor(tensor.name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    temporary.replace(target)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m infer.peers.gguf")
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--dtype", choices=sorted(TYPES), required=True)
    args = parser.parse_args()
    write(args.source, args.target, args.dtype)


if __name__ == "__main__":
    main()
