"""The trimmed vocabularies of an artifact: which ids each exit can propose, checked against its manifest."""

from __future__ import annotations

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from infer.artifact import Artifact
from infer.manifest import EXPORT_AGAIN

FILE = "draft_vocab.safetensors"


def read_draft_vocabs(artifact: Artifact, device: str) -> dict[str, Tensor]:
    """Exit name → [V'] int64 sorted ids, for the exits that are trimmed; ValueError where the file says otherwise."""
    manifest, path = artifact.manifest, artifact.path / FILE
    sizes = {e.name: e.vocab_size for e in manifest.exits if e.vocab_size is not None}
    if not sizes:
        return {}
    if not path.exists():
        raise ValueError(f"{path} is missing, but exits {sorted(sizes)} are trimmed; {EXPORT_AGAIN}")
    try:
        vocabs = load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path}: no safetensors file ({error}); {EXPORT_AGAIN}") from error
    if vocabs.keys() != sizes.keys():
        raise ValueError(f"{path}: holds {sorted(vocabs)}, but exits {sorted(sizes)} are trimmed; {EXPORT_AGAIN}")
    for name, ids in vocabs.items():
        if ids.dtype != torch.int64 or tuple(ids.shape) != (sizes[name],):
            raise ValueError(
                f"{path}: {name} is {ids.dtype} {list(ids.shape)}, expected int64 [{sizes[name]}]; {EXPORT_AGAIN}"
            )
        if int(ids[0]) < 0 or int(ids[-1]) >= manifest.base.vocab_size or bool((ids[1:] <= ids[:-1]).any()):
            raise ValueError(
                f"{path}: ids of {name} must ascend strictly within 0..{manifest.base.vocab_size - 1}; {EXPORT_AGAIN}"
            )
    return {name: ids.to(device) for name, ids in vocabs.items()}
