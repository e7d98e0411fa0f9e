"""How many KV blocks a pool gets when nobody says so: arithmetic over what the device has left.

On CUDA, as in vLLM, `gpu_memory_utilization` is the share of the device's whole memory that may be in use:

    0            in use now: weights, other processes            utilization · total        total
    |--------------------------|--- KV blocks ---|--- one round's scores ---|---- left alone ----|
"""

from __future__ import annotations

import torch

from infer.manifest import Manifest

DEFAULT_KV_BYTES = 1 << 30  # on CPU
# A token's score for one id, while tokens are picked with noise: the logit, float64 scores and the noise's int64 and
# float64 temporaries (`sampler._scores`, `noise.gumbel_of`), eight numbers of 8 bytes at most at once.
BYTES_PER_SCORE = 64
_GIB = 1 << 30


def bytes_per_block(manifest: Manifest, itemsize: int) -> int:
    """Of K and V in all layers; `itemsize` is that of one number."""
    base = manifest.base
    return 2 * manifest.num_kv_layers * manifest.block_size * base.num_kv_heads * base.head_dim * itemsize


def default_num_blocks(
    manifest: Manifest,
    itemsize: int,
    max_num_seqs: int,
    *,
    device: str,
    gpu_memory_utilization: float,
    num_scored: int,
    num_scratch_blocks: int = 0,
) -> int:
    """Blocks for `max_num_seqs` sequences of the greatest length, as far as memory goes, and the null block.

    Args:
        itemsize: bytes of one number of K or V.
        gpu_memory_utilization: ignored on CPU, where the pool gets at most 1 GiB, or else one sequence.
        num_scored: most tokens that a round scores in one sequence.
        num_scratch_blocks: those that a sequence needs beside its text's.

    Raises:
        ValueError: the GPU has no room for one sequence.
    """
    base, size = manifest.base, manifest.block_size
    block_bytes = bytes_per_block(manifest, itemsize)
    row = -(-manifest.limits.max_model_len // size) + num_scratch_blocks
    if device == "cpu":
        return 1 + max(row, min(max_num_seqs * row, DEFAULT_KV_BYTES // block_bytes))
    torch.cuda.empty_cache()  # what loading has freed counts as free
    free, total = torch.cuda.mem_get_info()
    used = total - free
    scores = max_num_seqs * num_scored * base.vocab_size * BYTES_PER_SCORE
    allowed = int(gpu_memory_utilization * total) - used - scores
    num_blocks = min(1 + max_num_seqs * row, allowed // block_bytes)
    if num_blocks < 1 + row:
        raise ValueError(
            f"gpu_memory_utilization={gpu_memory_utilization} of {total / _GIB:.2f} GiB leaves "
            f"{max(0, allowed) / _GIB:.2f} GiB for KV blocks ({used / _GIB:.2f} GiB are in use, a round's scores take "
            f"{scores / _GIB:.2f}), and one sequence of max_model_len={manifest.limits.max_model_len} takes "
            f"{(1 + row) * block_bytes / _GIB:.2f}: free memory on the GPU, raise gpu_memory_utilization, lower "
            "max_num_seqs, export with a smaller --max-model-len, or set num_blocks"
        )
    return num_blocks
