"""How one request wants its text: vLLM's `SamplingParams`, by name and by default.

Knows nothing of logits, rows or tokenizers. What a value means is said at its field; what HiSpec does not do is listed
here too, so that asking for it is refused by name instead of being ignored.
"""

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

# Below this temperature a row is greedy: the noise could no longer change the order of two half-precision logits, and
# dividing by, say, 1e-39 would overflow. It is vLLM's threshold as well.
GREEDY_BELOW = 1e-5

MAX_STOP_STRINGS = 64  # each one is searched for after every token
MAX_CHOICES = 128  # as with OpenAI's API


@dataclass(frozen=True)
class SamplingParams:
    _: KW_ONLY
    temperature: float = 1.0
    """Divides the logits; 0 (any value below 1e-5) always takes the most probable token."""
    top_p: float = 1.0
    """Keep the smallest set of most probable tokens that holds this mass; 1 keeps all."""
    top_k: int = 0
    """Keep the k most probable tokens; 0 or -1 keeps all."""
    seed: int | None = None
    """Equal seeds give equal text; None: the engine draws one. Stored as signed 64 bit; -1 is a seed as any other."""
    max_tokens: int | None = 16
    """Most tokens to generate; None: up to the model's length."""
    stop: str | Sequence[str] | None = None
    """End the text before the first of these strings. Stored as a tuple."""
    stop_token_ids: Sequence[int] | None = None
    """End the text after one of these tokens. Stored as a tuple."""
    ignore_eos: bool = False
    """Go on after the end-of-sequence token."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    include_stop_str_in_output: bool = False
    """Cut the text after the stop string, not before it."""
    n: int = 1
    """How many texts to write for the prompt, each with noise of its own; greedy ones are equal."""

    # What vLLM has and HiSpec does not: the value below is the only one accepted.
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_p: float = 0.0
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    structured_outputs: Any = None
    truncate_prompt_tokens: int | None = None
    detokenize: bool = True
    spaces_between_special_tokens: bool = True

    def __post_init__(self) -> None:
        _check_number("temperature", self.temperature)
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"temperature={self.temperature} must be a finite number >= 0; 0 is greedy")
        _check_number("top_p", self.top_p)
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} must lie in (0, 1]; 1 keeps all tokens")
        _check_int("top_k", self.top_k)
        if self.top_k < -1:
            raise ValueError(f"top_k={self.top_k} must be at least 1, or 0 or -1 to keep all tokens")
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens)
            if self.max_tokens < 1:
                raise ValueError(f"max_tokens={self.max_tokens} must be at least 1, or None for no limit of its own")
        _check_int("n", self.n)
        if not 1 <= self.n <= MAX_CHOICES:
            raise ValueError(f"n={self.n} must lie between 1 and {MAX_CHOICES}")
        for name in ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}={getattr(self, name)!r} must be True or False")
        self._refuse_unsupported()
        # The three fields with several spellings get one; `object.__setattr__`, as this is still construction.
        object.__setattr__(self, "seed", _signed_seed(self.seed))
        object.__setattr__(self, "stop", _stop_strings(self.stop))
        object.__setattr__(self, "stop_token_ids", _stop_token_ids(self.stop_token_ids))

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    def _refuse_unsupported(self) -> None:
        for name, accepted in _ONLY_ACCEPTED.items():
            value = getattr(self, name)
            if value != accepted or isinstance(value, bool) != isinstance(accepted, bool):
                raise ValueError(f"{name}={value!r} is not supported: leave it out (or pass {accepted!r})")


# fmt: off
_ONLY_ACCEPTED: dict[str, Any] = {
    name: SamplingParams.__dataclass_fields__[name].default
    for name in (
        "presence_penalty", "frequency_penalty", "repetition_penalty", "min_p", "min_tokens", "logprobs",
        "prompt_logprobs", "logit_bias", "allowed_token_ids", "bad_words", "structured_outputs",
        "truncate_prompt_tokens", "detokenize", "spaces_between_special_tokens",
    )
}
# fmt: on


def _check_int(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name}={value!r} must be an int, got {type(value).__name__}")


def _check_number(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name}={value!r} must be a number, got {type(value).__name__}")


def _signed_seed(seed: int | None) -> int | None:
    """Both readings of 64 bits are welcome: 2**64 - 1 and -1 are the same seed."""
    if seed is None:
        return None
    _check_int("seed", seed)
    if not -(2**63) <= seed < 2**64:
        raise ValueError(f"seed={seed} must fit in 64 bits: choose one from 0 to 2**64 - 1")
    return seed - 2**64 if seed >= 2**63 else seed


def _stop_strings(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    strings = () if stop is None else (stop,) if isinstance(stop, str) else stop
    if not isinstance(strings, list | tuple) or not all(isinstance(s, str) for s in strings):
        raise ValueError(f"stop={stop!r} must be a string or a list of strings")
    if "" in strings:
        raise ValueError(f"stop={stop!r} holds an empty string, which would end every text at once: remove it")
    if len(strings) > MAX_STOP_STRINGS:
        raise ValueError(f"stop holds {len(strings)} strings: give at most {MAX_STOP_STRINGS}")
    return tuple(strings)


def _stop_token_ids(ids: Sequence[int] | None) -> tuple[int, ...]:
    if ids is not None and not isinstance(ids, list | tuple):
        raise ValueError(f"stop_token_ids={ids!r} must be a list of token ids")
    for token_id in ids or ():
        _check_int("stop_token_ids", token_id)
        if token_id < 0:
            raise ValueError(f"stop_token_ids={list(ids or ())} holds {token_id}: token ids start at 0")
    return tuple(ids or ())
