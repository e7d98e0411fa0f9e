"""Tiny random decoders of every family, made so that errors show; knows nothing of exits, tiers or artifacts.

Matrices are scaled (else greedy repeats one token for ever), embeddings are untied, biases are random, no norm weight
is 1 (a norm applied twice would otherwise go unseen), and head_dim is not hidden / heads where a family allows it.
"""

from collections.abc import Callable
from typing import Any

import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

NUM_LAYERS = 6
VOCAB_SIZE = 128
MATRIX_SCALE = 8.0

_SHARED: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "pad_token_id": 0,
    "eos_token_id": None,
}
_GQA: dict[str, Any] = _SHARED | {"hidden_size": 48, "intermediate_size": 96, "num_key_value_heads": 2}
_OPT: dict[str, Any] = _SHARED | {"hidden_size": 48, "ffn_dim": 96, "word_embed_proj_dim": 48, "dropout": 0.0}

_FAMILIES: dict[str, tuple[Callable[..., Any], Callable[..., PreTrainedModel], dict[str, Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, _GQA),
    "llama-head-dim": (LlamaConfig, LlamaForCausalLM, _GQA | {"head_dim": 16}),
    "mistral": (MistralConfig, MistralForCausalLM, _GQA | {"head_dim": 16, "sliding_window": None}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, _GQA),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, _GQA | {"head_dim": 16}),
    "opt": (OPTConfig, OPTForCausalLM, _OPT),
    "opt-350m-shape": (OPTConfig, OPTForCausalLM, _OPT | {"word_embed_proj_dim": 32, "do_layer_norm_before": False}),
    "gemma3": (
        Gemma3TextConfig,
        Gemma3ForCausalLM,
        _GQA | {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 4096},
    ),
}
FAMILIES = tuple(_FAMILIES)


def make_tiny_model(family: str, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A frozen fp32 model in eval mode; `overrides` go to the config, the same arguments give the same weights."""
    if family not in _FAMILIES:
        raise ValueError(f"family={family!r} is unknown; expected one of {', '.join(FAMILIES)}")
    make_config, make_model, defaults = _FAMILIES[family]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = make_model(make_config(**(defaults | overrides))).to(torch.float32)
        _randomize(model)
    return model.eval().requires_grad_(False)


@torch.no_grad()
def _randomize(model: PreTrainedModel) -> None:
    """Scale the matrices, draw every bias, and spread the effective norm weights over 0.5 … 1.5."""
    is_opt = isinstance(model, OPTForCausalLM)
    for module in model.modules():
        is_norm = "norm" in type(module).__name__.lower()
        for name, parameter in module.named_parameters(recurse=False):
            if is_norm and name == "weight":
                parameter.uniform_(0.5, 1.5)
                if "Gemma" in type(module).__name__:  # Gemma multiplies by 1 + weight
                    parameter.sub_(1.0)
            elif name == "bias":
                parameter.uniform_(-0.2, 0.2)
            else:
                parameter.mul_(MATRIX_SCALE)
                # An OPT branch is nearly constant (ReLU, biases): without large embeddings it drowns the tokens
                if is_opt and isinstance(module, torch.nn.Embedding):
                    parameter.mul_(8.0)
    if is_opt and not model.config.do_layer_norm_before:
        for layer in model.model.decoder.layers:  # a norm after each sum shrinks the tokens' share twelve times
            for branch in (layer.self_attn.out_proj, layer.fc2):
                branch.weight.mul_(0.25)
                branch.bias.mul_(0.25)
