"""The new reference model that a trained base becomes: its parts in the folder heads/, its identity, its making.

heads/adapter/  lora: the adapters in peft's own format (`PeftModel.from_pretrained` reads it). The base is not there
heads/base/     full: the whole model as a Hugging Face folder, which `model.base` of another config takes
heads/exits.json has `backbone`: the mode, what training began with, a hash of the weights and the drift

A new reference has the config of the base that it came from, and one key more: `hispec_reference`, mode and hash of
weights. So its fingerprint is its own, and heads meet no other base than the one they were trained on.
This file knows nothing of exits, losses or Lightning.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from peft import PeftModel
from safetensors.torch import save_file
from transformers import PreTrainedConfig, PreTrainedModel

from train.backbone import Backbone, adapter_state, cast_parameters
from train.base_model import base_fingerprint, config_sha256, dtype_of, find_tokenizer, load_base, quiet, resolve_base

MARK = "hispec_reference"
ADAPTER, BASE = "adapter", "base"


class Drift(NamedTuple):
    """How far a new reference is from the base that training began with, on held-out text; means over its labels."""

    kl: float  # nats, KL(base ‖ new)
    agreement: float  # share of labels at which both would pick the same token
    base_loss: float  # nats, cross-entropy of the text's own tokens
    new_loss: float
    num_labels: int

    def __str__(self) -> str:
        return (
            f"KL(base ‖ new) {self.kl:.4f} nats, same token {self.agreement:.1%}, cross-entropy {self.base_loss:.4f} → "
            f"{self.new_loss:.4f} nats on {self.num_labels} held-out labels"
        )


def write_reference(folder: Path, base: PreTrainedModel, mode: Backbone, drift: Drift | None) -> dict[str, Any]:
    """Write what makes the new reference into `folder`; what exits.json is to say of it: `base` and `backbone`."""
    before = base_fingerprint(base)
    if mode == "lora":
        weights = folder / ADAPTER
        weights.mkdir()
        save_file(adapter_state(base), weights / "adapter_model.safetensors")
        config = copy.copy(base.peft_config["default"])
        config.base_model_name_or_path, config.revision = before["name"], before["revision"]
        config.inference_mode = True
        config.save_pretrained(weights)
        name, revision = before["name"], before["revision"]
    else:
        weights = folder / BASE
        with quiet():
            base.save_pretrained(weights)
        tokenizer = find_tokenizer(before["name"] or "", getattr(base, "base_revision", None))
        if tokenizer is not None:
            tokenizer.save_pretrained(weights)
        name, revision = BASE, None
    digest = weights_sha256(weights)
    config = marked(base.config, mode, digest)
    if mode == "full":
        config.save_pretrained(weights)
    return {
        "base": {"name": name, "revision": revision, "config_sha256": config_sha256(config)},
        "backbone": {
            "mode": mode,
            "is_new_reference": True,
            "trained_from": before,
            "weights_sha256": digest,
            "drift": None if drift is None else drift._asdict(),
        },
    }


def load_reference(folder: Path, record: Mapping[str, Any], dtype: str = "float32") -> PreTrainedModel:
    """The base that the heads of `folder` belong to, frozen and in eval mode.

    Args:
        record: of exits.json.

    Raises:
        ValueError: its weights are missing or not those of the record, or the base is another one than it was.
    """
    backbone = record.get("backbone")
    if backbone is None:
        return load_base(*base_of(folder, record), dtype=dtype)
    mode = backbone["mode"]
    weights = folder / (ADAPTER if mode == "lora" else BASE)
    if not weights.is_dir() or weights_sha256(weights) != backbone["weights_sha256"]:
        raise ValueError(
            f"{weights}: missing, or not the weights that {folder}/exits.json was written with; copy the folder heads/ "
            "whole, or train again"
        )
    if mode == "full":
        return load_base(*base_of(folder, record), dtype=dtype)
    before = backbone["trained_from"]
    # Merged in float32, so that every dtype is rounded from the same reference
    base = load_base(before["name"], given_revision(before))
    if config_sha256(base.config) != before["config_sha256"]:
        raise ValueError(
            f"{weights}: the adapters were trained on another {before['name']!r}: its config differs from that of the "
            "one found now; give that one back its place"
        )
    merged: PreTrainedModel = PeftModel.from_pretrained(base, weights).merge_and_unload(safe_merge=True)
    setattr(merged.config, MARK, _mark(mode, backbone["weights_sha256"]))  # the layers share this config: no copy
    cast_parameters(merged, dtype_of(dtype))
    merged.config.dtype = dtype_of(dtype)
    return merged.eval().requires_grad_(False)


def base_of(folder: Path, record: Mapping[str, Any]) -> tuple[str, str | None]:
    """Name and revision of the model whose files (tokenizer among them) the heads in `folder` are served with."""
    backbone = record.get("backbone")
    if backbone is not None and backbone["mode"] == "full":
        return str(folder / BASE), None
    return record["base"]["name"], given_revision(record["base"])


def given_revision(base: Mapping[str, Any]) -> str | None:
    """The recorded revision, for a hub id; what is on this machine has none."""
    return base["revision"] if isinstance(resolve_base(base["name"]), str) else None


def describe_reference(backbone: Mapping[str, Any]) -> str:
    """What a new reference model was made of, and how far it is from that; `backbone` as in exits.json."""
    drift = "drift not measured" if backbone["drift"] is None else str(Drift(**backbone["drift"]))
    made_of, mode = backbone["trained_from"]["name"], backbone["mode"]
    return f"{made_of!r} but what training with model.backbone={mode} made of it: {drift}"


def marked(config: PreTrainedConfig, mode: Backbone, digest: str) -> PreTrainedConfig:
    """A copy of `config` that says which new reference it is of."""
    config = copy.deepcopy(config)
    setattr(config, MARK, _mark(mode, digest))
    return config


def _mark(mode: Backbone, digest: str) -> str:
    return f"{mode}:{digest}"


def weights_sha256(folder: Path) -> str:
    """Of all safetensors files in `folder`, in the order of their names."""
    digest = hashlib.sha256()
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as content:
            digest.update(hashlib.file_digest(content, "sha256").digest())
    return digest.hexdigest()
