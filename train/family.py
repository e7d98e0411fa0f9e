"""The one file that tells Llama from Qwen3 from OPT: a uniform view of a Hugging Face decoder.

`Family` exposes the parts that exits and tiers are made of: embedding, a span of decoder layers, the final norm, the
unembedding. It runs the model's own modules one after another, without a Cache object and without a mask: causality is
the attention function's business, which is chosen by name through transformers' `AttentionInterface`. This file knows
nothing of exits, paging or training.
"""

# Shape legend: B rows, T query positions, D hidden size, E size of the states that the unembedding reads, V vocabulary

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel

DENSE_ATTENTION = "hispec_dense"

_ROPE_FAMILIES = {
    "llama": "llama",
    "mistral": "mistral",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma3_text": "gemma3",
}
SUPPORTED = (*_ROPE_FAMILIES, "opt")


class Family:
    """A decoder as embedding → layers → norm → unembedding, whatever its architecture calls them.

    Raises ValueError for a model type that is not supported, or whose positions depend on the data.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        config = model.config
        if config.model_type not in SUPPORTED:
            raise ValueError(
                f"model_type={config.model_type!r} is not supported; supported are {', '.join(SUPPORTED)}. "
                "Llama-shaped models (SmolLM2, CodeLlama, …) have model_type 'llama'."
            )
        self.model = model
        self.config = config
        self.is_opt = config.model_type == "opt"
        self.name: str = "opt" if self.is_opt else _ROPE_FAMILIES[config.model_type]
        self.decoder_path = "model.decoder" if self.is_opt else "model"
        self.norm_path = f"{self.decoder_path}.{'final_layer_norm' if self.is_opt else 'norm'}"
        self.decoder: Any = model.get_submodule(self.decoder_path)
        self.num_layers: int = config.num_hidden_layers
        self.hidden_size: int = config.hidden_size
        self.vocab_size: int = config.vocab_size
        self.num_kv_heads: int = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        self.head_dim: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.exit_size: int = config.word_embed_proj_dim if self.is_opt else config.hidden_size
        self.max_positions: int = config.max_position_embeddings
        self._refuse_data_dependent_rope()

    def _refuse_data_dependent_rope(self) -> None:
        parameters = getattr(self.config, "rope_parameters", None) or {}
        kinds = [parameters] if "rope_type" in parameters else [p for p in parameters.values() if isinstance(p, dict)]
        for kind in kinds:
            if kind.get("rope_type") in ("dynamic", "longrope"):
                raise ValueError(
                    f"rope_type={kind['rope_type']!r} changes its frequencies with the text's length, so a token's "
                    "keys would depend on when they were computed; use a base with rope_type default, llama3 or yarn"
                )

    # ---- parts ----

    def embed(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """token_ids, positions [B, T] int64 (positions ≥ 0) → hidden states before layer 0 [B, T, D]."""
        hidden: Tensor = self.decoder.embed_tokens(token_ids)
        if self.is_opt:
            if self.decoder.project_in is not None:
                hidden = self.decoder.project_in(hidden)
            learned = self.decoder.embed_positions
            hidden = hidden + F.embedding(positions + learned.offset, learned.weight)
        return hidden

    def run_layers(self, hidden: Tensor, positions: Tensor, start: int, stop: int, **attention: Any) -> Tensor:
        """Layers [start, stop) on hidden [B, T, D] at positions [B, T]; `attention` reaches the attention function."""
        return self.run_each(self.decoder.layers[start:stop], hidden, positions, **attention)

    def run_each(self, layers: Any, hidden: Tensor, positions: Tensor, **attention: Any) -> Tensor:
        """As `run_layers`, for any decoder layers of this family (an exit's own layer among them)."""
        rotary: dict[str | None, Any] = {}
        for layer in layers:
            kind = getattr(layer.self_attn, "layer_type", None) if self.name == "gemma3" else None
            if not self.is_opt and kind not in rotary:
                args = (hidden, positions) if kind is None else (hidden, positions, kind)
                rotary[kind] = self.decoder.rotary_emb(*args)
            extra = {} if self.is_opt else {"position_embeddings": rotary[kind]}
            hidden = layer(hidden, attention_mask=None, position_ids=positions, **extra, **attention)
        return hidden

    def final_norm(self) -> nn.Module:
        """The norm before the unembedding; Identity where the family has none (post-norm OPT)."""
        norm = self.decoder.final_layer_norm if self.is_opt else self.decoder.norm
        return nn.Identity() if norm is None else norm

    def project_out(self, hidden: Tensor) -> Tensor:
        """Hidden states [.., D] after the norm → what the unembedding reads [.., E]."""
        if self.is_opt and self.decoder.project_out is not None:
            return self.decoder.project_out(hidden)
        return hidden

    def unembed(self, hidden: Tensor, weight: Tensor | None = None) -> Tensor:
        """[.., E] → logits [.., V], or over the rows of `weight` [V', E] of a trimmed vocabulary."""
        logits = F.linear(hidden, self.unembedding if weight is None else weight)
        cap = getattr(self.config, "final_logit_softcapping", None)
        return logits if cap is None else torch.tanh(logits / cap) * cap

    @property
    def unembedding(self) -> Tensor:
        """The unembedding matrix [V, E]."""
        return self.model.lm_head.weight

    @property
    def linear_names(self) -> list[str]:
        """Names of the linear layers inside a decoder layer, attention's first: what adapters may go on."""
        layer = self.decoder.layers[0]
        return [name.rpartition(".")[-1] for name, module in layer.named_modules() if isinstance(module, nn.Linear)]

    @property
    def sliding_window(self) -> int | None:
        """The narrowest sliding window of any layer, or None; sequences within it need no special care."""
        window = getattr(self.config, "sliding_window", None)
        kinds = getattr(self.config, "layer_types", None)
        uses = self.name == "mistral" if kinds is None else "sliding_attention" in kinds
        return window if uses else None

    def new_layer(self, like: int) -> nn.Module:
        """A trainable copy of decoder layer `like`, which must attend without a sliding window."""
        layer = copy.deepcopy(self.decoder.layers[like], {id(self.config): self.config})  # one choice of attention
        layer.requires_grad_(True)
        return layer

    def config_of_layers(self, layers: Sequence[int]) -> PreTrainedConfig:
        """A copy of the config for a model whose layers are each like the one of the base that has this number.

        Args:
            layers: numbers of the base's layers, ascending.
        """
        config = copy.deepcopy(self.config)
        config.num_hidden_layers = len(layers)
        if getattr(config, "layer_types", None) is not None:
            config.layer_types = [config.layer_types[i] for i in layers]
        if getattr(config, "max_window_layers", None) is not None:  # Qwen: layers below it attend without a window
            config.max_window_layers = sum(i < config.max_window_layers for i in layers)
        return config

    @property
    def attention(self) -> str:
        """The attention function's registered name."""
        return self.config._attn_implementation

    def use_attention(self, name: str) -> None:
        """Choose the registered attention function. The config is this model's own copy (`load_base`)."""
        self.config._attn_implementation = name


def dense_attention(
    module: nn.Module,
    query: Tensor,  # [B, H, T, head_dim]
    key: Tensor,  # [B, kv heads, T, head_dim]
    value: Tensor,  # [B, kv heads, T, head_dim]
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    visible: Tensor | None = None,  # [B, 1, T, T] bool from `row_mask`, for packed rows
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention without padding mask: batches are padded on the right, where causality hides the padding."""
    grouped = query.shape[1] != key.shape[1]
    out = F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=visible,
        is_causal=visible is None,
        scale=scaling,
        dropout_p=dropout,
        enable_gqa=grouped,
    )
    return out.transpose(1, 2).contiguous(), None


def row_mask(positions: Tensor) -> Tensor:
    """positions [B, T], 0 where a packed row begins → [B, 1, T, T] bool: a token sees its own row up to itself."""
    rows = (positions == 0).cumsum(dim=-1)
    return (rows.unsqueeze(-1) == rows.unsqueeze(-2)).tril().unsqueeze(1)


AttentionInterface.register(DENSE_ATTENTION, dense_attention)
