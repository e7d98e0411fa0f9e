"""Bases that come quantised: each is a reference of its own, which nothing here makes.

torchao's int8 weights (`Int8WeightOnlyConfig`) are accepted. Such a matrix stands for plain numbers, int8 times a scale
for each row, and a program that holds these computes what the quantised model does; in fp32 it serves that model's own
tokens. What quantises activations too, or needs kernels of its own, has no such plain numbers and is refused by name.

The config that is left says what it was under another key than Hugging Face's: with that one a folder of plain numbers
would not load, and with none heads would be taken for those of the base that was quantised.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

MARK = "hispec_quantization"  # in the config: Hugging Face's `quantization_config`

_METHOD, _ACCEPTED = "torchao", "Int8WeightOnlyConfig"


def check_quantization(name: str, config: PreTrainedConfig) -> None:
    """ValueError unless base `name` is plain or of int8 weights, and the package is there that reads these."""
    told = getattr(config, "quantization_config", None)
    if told is None:
        return
    record = _as_dict(told)
    method, kinds = record.get("quant_method"), record.get("quant_type")
    if method != _METHOD:
        raise ValueError(
            f"base model {name!r}: quantization_config.quant_method={str(method)!r} is not supported, only {_METHOD}'s "
            f"{_ACCEPTED}; give the base that was quantised, or a folder of plain numbers: model.dequantize(), then "
            "model.save_pretrained(DIR)"
        )
    found = {str(key): str(kind.get("_type")) if isinstance(kind, dict) else str(kind) for key, kind in _kinds(kinds)}
    if found != {"default": _ACCEPTED}:
        raise ValueError(
            f"base model {name!r}: quantization_config.quant_type={found} of {_METHOD} is not supported, only "
            f"{_ACCEPTED} for all its layers; quantise it so, or give the base that was quantised"
        )
    if importlib.util.find_spec(_METHOD) is None:
        raise ValueError(f"base model {name!r} is quantised with {_METHOD}, not installed here: pip install {_METHOD}")


def to_plain(model: PreTrainedModel) -> None:
    """Put plain numbers in the place of quantised matrices, and mark the config."""
    for module in model.modules():
        for name, weight in list(module.named_parameters(recurse=False)):
            if hasattr(weight, "dequantize") and type(weight).__module__.startswith(_METHOD):
                setattr(module, name, nn.Parameter(weight.dequantize(), requires_grad=False))
    model.hf_quantizer, model.is_quantized = None, False
    model._weight_conversions = []  # else save_pretrained would convert back what is plain now
    mark(model.config)


def mark(config: PreTrainedConfig) -> None:
    """Move what a config says of quantisation to MARK, as plain JSON; one that says nothing stays as it is."""
    if (told := getattr(config, "quantization_config", None)) is not None:
        record = _as_dict(told)
        setattr(config, MARK, record | {"quant_method": str(getattr(m := record["quant_method"], "value", m))})
        del config.quantization_config


def _as_dict(told: Any) -> dict[str, Any]:
    return dict(told if isinstance(told, Mapping) else told.to_dict())


def _kinds(kinds: Any) -> list[tuple[Any, Any]]:
    return list(kinds.items()) if isinstance(kinds, Mapping) else [("default", kinds)]
