"""What decides sizes in the configs of the recipes' bases, as published on the hub; for tests without a network.

Positions, RoPE's settings and special ids matter to no size, so most are left at the class's defaults.
"""

from typing import Any

from transformers import AutoConfig, PreTrainedConfig


def _llama(layers: int, hidden: int, intermediate: int, heads: int, kv_heads: int, vocab: int, **more: Any) -> dict:
    return {
        "model_type": "llama",
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "max_position_embeddings": 4096,
        **more,
    }


def _qwen3(layers: int, hidden: int, intermediate: int, heads: int, tied: bool) -> dict:
    config = _llama(layers, hidden, intermediate, heads, 8, 151936, head_dim=128, tie_word_embeddings=tied)
    return {**config, "model_type": "qwen3", "max_position_embeddings": 40960}


def _opt(layers: int, hidden: int, heads: int) -> dict:
    return {
        "model_type": "opt",
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "word_embed_proj_dim": hidden,
        "ffn_dim": 4 * hidden,
        "num_attention_heads": heads,
        "vocab_size": 50272,
        "max_position_embeddings": 2048,
    }


_LLAMA2_7B = _llama(32, 4096, 11008, 32, 32, 32000)
_LLAMA2_13B = _llama(40, 5120, 13824, 40, 40, 32000)
_LLAMA2_70B = _llama(80, 8192, 28672, 64, 8, 32000)
_LLAMA3_8B = _llama(32, 4096, 14336, 32, 8, 128256, max_position_embeddings=8192)
_LLAMA32_1B = _llama(
    16, 2048, 8192, 32, 8, 128256, head_dim=64, tie_word_embeddings=True, max_position_embeddings=131072
)
_CODE_7B = _llama(32, 4096, 11008, 32, 32, 32016, max_position_embeddings=16384)
_CODE_34B = _llama(48, 8192, 22016, 64, 8, 32000, max_position_embeddings=16384)

PUBLISHED: dict[str, dict] = {
    "smollm2-135m": _llama(30, 576, 1536, 9, 3, 49152, tie_word_embeddings=True),
    "Qwen/Qwen3-0.6B": _qwen3(28, 1024, 3072, 16, True),
    "Qwen/Qwen3-1.7B": _qwen3(28, 2048, 6144, 16, True),
    "Qwen/Qwen3-4B": _qwen3(36, 2560, 9728, 32, True),
    "Qwen/Qwen3-8B": _qwen3(36, 4096, 12288, 32, False),
    "Qwen/Qwen3-14B": _qwen3(40, 5120, 17408, 40, False),
    "Qwen/Qwen3-32B": _qwen3(64, 5120, 25600, 64, False),
    "facebook/opt-125m": _opt(12, 768, 12),
    "facebook/opt-1.3b": _opt(24, 2048, 32),
    "facebook/opt-6.7b": _opt(32, 4096, 32),
    "facebook/opt-13b": _opt(40, 5120, 40),
    "meta-llama/Llama-2-7b-chat-hf": _LLAMA2_7B,
    "meta-llama/Llama-2-13b-chat-hf": _LLAMA2_13B,
    "meta-llama/Llama-2-70b-chat-hf": _LLAMA2_70B,
    "meta-llama/Meta-Llama-3-8B-Instruct": _LLAMA3_8B,
    "meta-llama/Llama-3.2-1B-Instruct": _LLAMA32_1B,
    "codellama/CodeLlama-7b-Instruct-hf": _CODE_7B,
    "codellama/CodeLlama-34b-Instruct-hf": _CODE_34B,
    "facebook/layerskip-llama2-7B": _LLAMA2_7B,
    "facebook/layerskip-llama2-13B": _LLAMA2_13B,
    "facebook/layerskip-llama2-70B": _LLAMA2_70B,
    "facebook/layerskip-codellama-7B": _CODE_7B,
    "facebook/layerskip-codellama-34B": _CODE_34B,
    "facebook/layerskip-llama3-8B": _LLAMA3_8B,
    "facebook/layerskip-llama3.2-1B": _LLAMA32_1B,
}


def published_config(base: str) -> PreTrainedConfig:
    values = dict(PUBLISHED[base])
    return AutoConfig.for_model(values.pop("model_type"), **values)
