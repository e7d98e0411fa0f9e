"""How one request wants its text: vLLM's `SamplingParams`, by name and by default.

Knows nothing of logits, rows or tokenizers. What a value means is said at its field; what HiSpec does not do is listed
here too, so that asking for it is refused by name instead of being ignored.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

from infer.structured_outputs import StructuredOutputsParams

# Below this temperature a row is greedy: the noise could no longer change the order of two half-precision logits, and
# dividing by, say, 1e-39 would overflow. It is vLLM's threshold as well.
GREEDY_BELOW = 1e-5

MAX_STOP_STRINGS = 64  # each one is searched for after every token
MAX_BAD_WORDS = 1024
MAX_LOGIT_BIASES = 1024  # as in vLLM
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
    min_p: float = 0.0
    """Keep tokens at least this many times as probable as the most probable one; 0 keeps all."""
    seed: int | None = None
    """Equal seeds give equal text; None: the engine draws one. Stored as signed 64 bit; -1 is a seed as any other."""
    max_tokens: int | None = 16
    """Most tokens to generate; None: up to the model's length."""
    min_tokens: int = 0
    """Tokens to generate before one may end the text: EOS and stop tokens can't be picked, stop strings don't count."""
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

    detokenize: bool = True
    """Make text of the tokens; without it, text stays empty."""
    speculate: bool = True
    """False decodes this text plainly, in the same rounds as those that speculate: the engine's strategy is not for it.

    vLLM has no such field. It is there to compare with; the tokens are the same (with `verification="rejection"` their
    law)."""

    # What follows changes the logits; `processors` has the order.
    presence_penalty: float = 0.0
    """Taken off the logit of every token that was generated; -2 to 2."""
    frequency_penalty: float = 0.0
    """Taken off a token's logit once for every time it was generated; -2 to 2."""
    repetition_penalty: float = 1.0
    """Divides positive logits, multiplies negative ones, of tokens in the prompt or generated; above 1 is a penalty."""
    logit_bias: Mapping[int, float] | None = None
    """Added to the logits of these token ids; -100 to 100."""
    allowed_token_ids: Sequence[int] | None = None
    """Only these tokens may be picked, EOS included only if it is listed. Stored as a tuple."""
    bad_words: Sequence[str] | None = None
    """Texts that must not be generated: the last token that would complete one can't be picked. Stored as a tuple."""

    structured_outputs: StructuredOutputsParams | None = None
    """The form that the text shall have, e.g. `StructuredOutputsParams(json=schema)`. EOS can be picked as soon as the
    text is whole, and nothing else can once it can't go on. Under ignore_eos EOS tokens follow the first one; where
    min_tokens still hold EOS back, no token is left, which ends the request with that cause."""

    logprobs: int | None = None
    """Log probabilities of every generated token and of this many most probable ones; -1: of the whole vocabulary.

    They are the model's own, before anything above changes them."""
    prompt_logprobs: int | None = None
    """The same for the prompt's tokens."""

    # What vLLM has and HiSpec does not: the value below is the only one accepted.
    truncate_prompt_tokens: int | None = None
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
        _check_number("min_p", self.min_p)
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p={self.min_p} must lie in [0, 1]; 0 keeps all tokens")
        self._check_lengths()
        _check_int("n", self.n)
        if not 1 <= self.n <= MAX_CHOICES:
            raise ValueError(f"n={self.n} must lie between 1 and {MAX_CHOICES}")
        self._check_penalties()
        for name in ("logprobs", "prompt_logprobs"):
            if (count := getattr(self, name)) is not None:
                _check_int(name, count)
                if count < -1:
                    raise ValueError(f"{name}={count} must be at least 0, or -1 for the whole vocabulary")
        for name in ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output", "detokenize", "speculate"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}={getattr(self, name)!r} must be True or False")
        if not isinstance(self.structured_outputs, StructuredOutputsParams | None):
            raise ValueError(
                f"structured_outputs={self.structured_outputs!r} must be a StructuredOutputsParams, "
                f"e.g. StructuredOutputsParams(choice=['yes', 'no'])"
            )
        self._refuse_unsupported()
        # The fields with several spellings get one; `object.__setattr__`, as this is still construction.
        object.__setattr__(self, "seed", _signed_seed(self.seed))
        object.__setattr__(self, "stop", _strings("stop", self.stop, MAX_STOP_STRINGS))
        object.__setattr__(self, "stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids))
        object.__setattr__(self, "bad_words", _bad_words(self.bad_words))
        object.__setattr__(self, "logit_bias", _logit_bias(self.logit_bias))
        if self.allowed_token_ids is not None:
            ids = _token_ids("allowed_token_ids", self.allowed_token_ids)
            if not ids:
                raise ValueError("allowed_token_ids=[] allows no token at all: list some, or pass None to allow all")
            object.__setattr__(self, "allowed_token_ids", ids)
        if self.stop and not self.detokenize:
            raise ValueError("detokenize=False makes no text to find stop strings in: leave out stop, or detokenize")

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    def check_vocabulary(self, vocab_size: int) -> None:
        """ValueError if a field speaks of ids that a model of `vocab_size` tokens does not have."""
        fields: dict[str, Iterable[int]] = {
            "stop_token_ids": self.stop_token_ids or (),
            "allowed_token_ids": self.allowed_token_ids or (),
            "logit_bias": self.logit_bias or (),
        }
        for name, ids in fields.items():
            if (largest := max(ids, default=0)) >= vocab_size:
                raise ValueError(f"{name} holds {largest}: this model's token ids are 0..{vocab_size - 1}, remove it")
        for name in ("logprobs", "prompt_logprobs"):
            if (getattr(self, name) or 0) > vocab_size:
                raise ValueError(
                    f"{name}={getattr(self, name)} is more than the model's {vocab_size} tokens; -1 is all"
                )

    def _check_lengths(self) -> None:
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens)
            if self.max_tokens < 1:
                raise ValueError(f"max_tokens={self.max_tokens} must be at least 1, or None for no limit of its own")
        _check_int("min_tokens", self.min_tokens)
        if self.min_tokens < 0:
            raise ValueError(f"min_tokens={self.min_tokens} must be at least 0; 0 lets the text end at once")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens={self.min_tokens} must be at most max_tokens={self.max_tokens}: lower it")

    def _check_penalties(self) -> None:
        for name in ("presence_penalty", "frequency_penalty"):
            _check_number(name, getattr(self, name))
            if not -2 <= getattr(self, name) <= 2:
                raise ValueError(f"{name}={getattr(self, name)} must lie in [-2, 2]; 0 changes nothing")
        _check_number("repetition_penalty", self.repetition_penalty)
        if not (math.isfinite(self.repetition_penalty) and self.repetition_penalty > 0):
            raise ValueError(
                f"repetition_penalty={self.repetition_penalty} must be a finite number > 0; 1 changes nothing"
            )

    def _refuse_unsupported(self) -> None:
        for name, accepted in _ONLY_ACCEPTED.items():
            value = getattr(self, name)
            if value != accepted or isinstance(value, bool) != isinstance(accepted, bool):
                raise ValueError(f"{name}={value!r} is not supported: leave it out (or pass {accepted!r})")


_ONLY_ACCEPTED: dict[str, Any] = {
    name: SamplingParams.__dataclass_fields__[name].default
    for name in ("truncate_prompt_tokens", "spaces_between_special_tokens")
}


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


def _strings(name: str, value: str | Sequence[str] | None, most: int) -> tuple[str, ...]:
    strings = () if value is None else (value,) if isinstance(value, str) else value
    if not isinstance(strings, list | tuple) or not all(isinstance(s, str) for s in strings):
        raise ValueError(f"{name}={value!r} must be a string or a list of strings")
    if "" in strings:
        raise ValueError(f"{name}={value!r} holds an empty string, which every text has: remove it")
    if len(strings) > most:
        raise ValueError(f"{name} holds {len(strings)} strings: give at most {most}")
    return tuple(strings)


def _bad_words(words: Sequence[str] | None) -> tuple[str, ...]:
    if isinstance(words, str):
        raise ValueError(f"bad_words={words!r} must be a list of strings: write [{words!r}]")
    strings = _strings("bad_words", words, MAX_BAD_WORDS)
    if not all(word.strip() for word in strings):
        raise ValueError(f"bad_words={words!r} holds a string of nothing but spaces: remove it")
    return strings


def _token_ids(name: str, ids: Sequence[int] | None) -> tuple[int, ...]:
    if ids is not None and not isinstance(ids, list | tuple):
        raise ValueError(f"{name}={ids!r} must be a list of token ids")
    for token_id in ids or ():
        _check_int(name, token_id)
        if token_id < 0:
            raise ValueError(f"{name} holds {token_id}: token ids start at 0")
    return tuple(ids or ())


def _logit_bias(biases: Mapping[int, float] | None) -> dict[int, float] | None:
    if biases is None:
        return None
    if not isinstance(biases, Mapping):
        raise ValueError(f"logit_bias={biases!r} must map token ids to numbers, e.g. {{50: -100}}")
    if len(biases) > MAX_LOGIT_BIASES:
        raise ValueError(f"logit_bias holds {len(biases)} token ids: give at most {MAX_LOGIT_BIASES}")
    _token_ids("logit_bias", list(biases))
    for token_id, bias in biases.items():
        _check_number(f"logit_bias[{token_id}]", bias)
        if not -100 <= bias <= 100:
            raise ValueError(f"logit_bias[{token_id}]={bias} must lie in [-100, 100]; -100 all but forbids a token")
    return dict(biases)
