"""What of the base is trained beside the exits: nothing (`frozen`), peft adapters (`lora`) or all of it (`full`).

`lora` and `full` give a new reference model: the exits are held to what the base says at that moment, and served with
the base as it has become. Which loss trains what:

frozen  exits → heads
lora    exits → heads, and the adapters below each exit, so that the layers learn to be left early; the text's own
        cross-entropy at the target → all adapters. As the judge of the exits the target is detached: it is never
        pulled towards them. On text that the base itself wrote, that cross-entropy is least at the base itself
full    LayerSkip's losses (`train.layerskip`) → all of the base; heads with weights of their own as with lora, while
        `native` exits are what LayerSkip's losses train, and their own is only shown

This file knows nothing of losses, files or Lightning.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from peft import LoraConfig, get_peft_model_state_dict, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from transformers import PreTrainedModel

from train.family import Family
from train.heads import ExitConfig

Backbone = Literal["frozen", "lora", "full"]
BACKBONES: tuple[Backbone, ...] = ("frozen", "lora", "full")


@dataclass(frozen=True, kw_only=True)
class Lora:
    """The adapters of `backbone: lora`.

    Args:
        r: rank.
        alpha: the adapters' output is scaled by alpha / r.
        dropout: of the adapters' input.
        target_modules: names of linear layers inside a decoder layer; None: all of them, attention and MLP, as QLoRA
            found to be needed (arXiv 2305.14314, §4).
        text_weight: weight of the text's cross-entropy at the target, beside the exits' losses.
        lr: highest learning rate of the adapters.
    """

    r: int = 16
    alpha: float = 32.0
    dropout: float = 0.0
    target_modules: list[str] | None = None
    text_weight: float = 1.0
    lr: float = 2e-4

    def check(self, where: str) -> None:
        """Raise ValueError naming the field, which is found at `where` in the config."""
        if self.r < 1:
            raise ValueError(f"{where}.r={self.r} must be at least 1")
        if not self.alpha > 0:
            raise ValueError(f"{where}.alpha={self.alpha} must be greater than 0")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"{where}.dropout={self.dropout} must be at least 0 and less than 1")
        if not self.text_weight > 0:
            raise ValueError(
                f"{where}.text_weight={self.text_weight} must be greater than 0: nothing else trains the adapters "
                "above the exits, or keeps the target a language model"
            )
        if not self.lr > 0:
            raise ValueError(f"{where}.lr={self.lr} must be greater than 0")

    def targets(self, family: Family, where: str) -> list[str]:
        """The names to adapt, in the family's order.

        Raises:
            ValueError: a name that is no linear layer of a decoder layer; embedding and unembedding are none.
        """
        known = family.linear_names
        for name in self.target_modules if self.target_modules is not None else ():
            if name not in known:
                tied = family.config.tie_word_embeddings and name in ("lm_head", "embed_tokens")
                reason = (
                    "one matrix is both embedding and unembedding here (tie_word_embeddings), and an adapter would "
                    "part them"
                    if tied
                    else "it is no linear layer inside a decoder layer, which are what adapters go on"
                )
                raise ValueError(
                    f"{where}.target_modules: {name!r} can't have an adapter: {reason}. Leave it out; "
                    f"this base has {', '.join(known)}"
                )
        if self.target_modules is not None and not self.target_modules:
            raise ValueError(f"{where}.target_modules is empty; name some of {', '.join(known)}, or leave it null")
        return [n for n in known if self.target_modules is None or n in self.target_modules]

    def peft_config(self, targets: Sequence[str]) -> LoraConfig:
        return LoraConfig(
            r=self.r,
            lora_alpha=self.alpha,
            lora_dropout=self.dropout,
            target_modules=list(targets),
            task_type="CAUSAL_LM",
        )


def check_backbone(backbone: str, exits: Sequence[ExitConfig], dtype: str, has_lora: bool, has_full: bool) -> None:
    """Raise ValueError for what does not go together in the section model of a config."""
    if backbone not in BACKBONES:
        raise ValueError(f"model.backbone={backbone!r} must be one of {', '.join(BACKBONES)}")
    for name, given, mode in (("lora", has_lora, "lora"), ("layerskip", has_full, "full")):
        if given and backbone != mode:
            raise ValueError(
                f"model.{name} is given, but model.backbone={backbone} has no use for it: leave it out, or set "
                f"model.backbone={mode}"
            )
    if backbone == "full" and dtype != "float32":
        raise ValueError(
            f"model.dtype={dtype} with model.backbone=full would train weights that can't hold small updates: set "
            "model.dtype=float32, and trainer.precision=bf16-mixed to compute in bfloat16"
        )
    for exit_ in exits if backbone == "full" else ():
        if not exit_.trains and exit_.loss is not None:
            raise ValueError(
                f"exits.{exit_.name}.loss: with model.backbone=full LayerSkip's losses train the exits of head native "
                "(model.layerskip.exit_scale): leave it out"
            )


# ---- adapters ----


def add_adapters(base: PreTrainedModel, config: LoraConfig) -> nn.ModuleDict:
    """Put adapters into `base`, in place; they change nothing yet.

    Returns their own modules by name, in float32 whatever the base's precision is: what is trained and nothing else.
    """
    inject_adapter_in_model(config, base)
    adapters = nn.ModuleDict()
    for name, module in base.named_modules():
        if isinstance(module, LoraLayer):
            parts = {"A": module.lora_A, "B": module.lora_B, "dropout": module.lora_dropout}
            adapters[name.replace(".", "/")] = nn.ModuleDict(parts)
    return adapters.float()


@contextmanager
def without_adapters(base: PreTrainedModel) -> Iterator[None]:
    """The base as it was before, for as long as the block lasts; of a base without adapters, nothing changes."""
    layers = [module for module in base.modules() if isinstance(module, LoraLayer)]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def adapter_state(base: PreTrainedModel) -> dict[str, Tensor]:
    """The adapters' weights under the names that `PeftModel.from_pretrained` reads."""
    found: dict[str, Any] = get_peft_model_state_dict(base)
    return {f"base_model.model.{name}": w.detach().cpu().contiguous() for name, w in found.items()}


def cast_parameters(model: nn.Module, dtype: torch.dtype) -> None:
    """As `from_pretrained(dtype=…)` does: parameters only, since RoPE's buffers stay float32."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
