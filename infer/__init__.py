"""HiSpec's runtime: loads an artifact and generates exactly what its target model would."""

import os
from typing import TYPE_CHECKING, Any

# Intel's MKL otherwise picks another summation order for another number of rows, so that a token's logits would depend
# on how many tokens are verified with it. Read once by MKL, so it must be set before torch computes anything.
os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")

if TYPE_CHECKING:
    from infer.async_llm import AsyncLLM
    from infer.llm import LLM
    from infer.output import CompletionOutput, Logprob, RequestOutput
    from infer.params import SamplingParams
    from infer.structured_outputs import StructuredOutputsParams

__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "Logprob",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
]

_HOMES = {
    "LLM": "infer.llm",
    "AsyncLLM": "infer.async_llm",
    "CompletionOutput": "infer.output",
    "Logprob": "infer.output",
    "RequestOutput": "infer.output",
    "SamplingParams": "infer.params",
    "StructuredOutputsParams": "infer.structured_outputs",
}


def __getattr__(name: str) -> Any:
    """Public names are imported when asked for: `python -m infer --help` should not wait for torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'infer' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
