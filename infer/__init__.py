"""HiSpec's runtime: loads an artifact and generates exactly what its target model would."""

import os

# Intel's MKL otherwise picks another summation order for another number of rows, so that a token's logits would depend
# on how many tokens are verified with it. Read once by MKL, so it must be set before torch computes anything.
os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")

from infer.llm import LLM  # noqa: E402
from infer.output import CompletionOutput, RequestOutput  # noqa: E402
from infer.params import SamplingParams  # noqa: E402

__all__ = ["LLM", "CompletionOutput", "RequestOutput", "SamplingParams"]
