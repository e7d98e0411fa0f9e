"""Which tokens may come next so that a text keeps to a grammar: xgrammar's masks as a function of the text so far.

A `GrammarState` stands behind some prefix only to be quick: asked about another one, it goes back to where they part
and on from there. So whatever was drafted and rejected, judged by several tiers or computed again, the mask depends on
the prefix alone. Knows neither logits nor rows. xgrammar is imported when the first grammar is compiled (the extra
`structured`).
"""

# Shape legend: N prefixes, V vocabulary, W = ⌈V / 32⌉ words of a mask, bit i % 32 of word i // 32 set if id i may come

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from infer import regex
from infer.json_schema import check_supported
from infer.structured_outputs import StructuredOutputsParams
from infer.tokenizer import NoTokenizer

_CACHE_BYTES = 1 << 29  # of compiled grammars; the least used go first
_ANYTHING = -1  # a word of ones


class GrammarCompiler:
    """Compiles what requests ask for, and keeps it for those that ask again.

    Args:
        tokenizer: of the artifact, a Hugging Face one.
        vocab_size: V of the model, which may have more ids than the tokenizer.
        eos_token_ids: what may end a text that is whole.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: Collection[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = sorted(eos_token_ids)
        self._compiler: Any = None  # xgrammar's, made when it is first needed

    def compile(self, wanted: StructuredOutputsParams) -> Grammar:
        """The grammar of what is wanted.

        Raises:
            ValueError: the schema, expression or grammar can't be compiled, xgrammar is not installed, or the artifact
                has no tokenizer or no EOS token.
        """
        kind = wanted.kind
        text = _source(wanted)
        if kind == "json":
            _check_schema(text)
        if kind == "regex" and (reason := regex.unsupported(text)):
            raise ValueError(f"structured_outputs.regex={_short(text)}: {reason}")
        if self._compiler is None:
            self._compiler = self._make_compiler()
        try:
            if kind in ("json", "json_object"):
                compiled = self._compiler.compile_json_schema(text, any_whitespace=not wanted.disable_any_whitespace)
            elif kind == "regex":
                compiled = self._compiler.compile_regex(text)
            elif kind == "grammar" and "::=" not in text:  # how vLLM tells them apart
                compiled = self._compiler.compile_lark(text)
            else:
                compiled = self._compiler.compile_grammar(text)
        except (RuntimeError, UnicodeError) as error:
            raise ValueError(f"structured_outputs.{kind}={_short(text)}: {_message(error)}") from error
        return Grammar(compiled, self._vocab_size, self._eos_token_ids)

    def _make_compiler(self) -> Any:
        if isinstance(self._tokenizer, NoTokenizer):
            raise ValueError(
                "structured_outputs: this artifact has no tokenizer, so its tokens spell nothing: leave it out"
            )
        if not self._eos_token_ids:
            raise ValueError("structured_outputs: this model has no EOS token to end the text with: leave it out")
        try:
            import xgrammar
        except ImportError as error:
            raise ValueError(
                f"structured_outputs needs the package xgrammar ({error}): pip install 'hispec[structured]'"
            ) from error
        # xgrammar takes special tokens for the text of their names. They have none once the text is decoded, so they
        # must not count as any: ids of empty text are never allowed.
        tokenizer = self._tokenizer
        added = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        vocab = ["" for _ in range(self._vocab_size)]
        for token, token_id in tokenizer.get_vocab().items():
            if token_id < self._vocab_size and token_id not in added:
                vocab[token_id] = token
        detected = xgrammar.TokenizerInfo.from_huggingface(
            tokenizer, vocab_size=self._vocab_size, stop_token_ids=self._eos_token_ids
        )
        info = xgrammar.TokenizerInfo(
            vocab,
            detected.vocab_type,
            vocab_size=self._vocab_size,
            stop_token_ids=self._eos_token_ids,
            add_prefix_space=detected.add_prefix_space,
        )
        return xgrammar.GrammarCompiler(info, max_threads=torch.get_num_threads(), cache_limit_bytes=_CACHE_BYTES)


class Grammar:
    """A compiled grammar; the rows of many requests may share it."""

    def __init__(self, compiled: Any, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self.num_words = -(-vocab_size // 32)
        self.compiled = compiled
        bits = torch.zeros(self.num_words * 32, dtype=torch.int64)
        bits[list(eos_token_ids)] = 1
        words = (bits.view(-1, 32) << torch.arange(32)).sum(dim=1)
        self.only_eos = torch.where(words < 2**31, words, words - 2**32).to(torch.int32)  # [W]


class GrammarState:
    """The masks of one row."""

    def __init__(self, grammar: Grammar) -> None:
        import xgrammar  # it has compiled the grammar

        self.num_words = grammar.num_words  # W
        self._only_eos = grammar.only_eos
        self._matcher = xgrammar.GrammarMatcher(grammar.compiled)
        # [0, num_taken)         the matcher stands behind these
        # [num_taken, len)       it refused the first of these, or they come after the text's end
        self._tokens: list[int] = []
        self._num_taken = 0

    def masks(self, output: Sequence[int], start: int, count: int) -> Tensor:
        """What may come after output[:start] and after each of the `count` - 1 next longer prefixes.

        After the text's end, only EOS. After a token that the grammar refuses, anything: only the guess of an exit that
        had no token to pick, or one looked up in the text, is refused, and no judge accepts it.

        Returns:
            [count, W] int32 on CPU
        """
        shared = min(len(self._tokens), start)
        if self._tokens[:shared] != list(output[:shared]):
            shared = next(i for i, (a, b) in enumerate(zip(self._tokens, output)) if a != b)
        self._go_back(shared)
        masks = torch.full((count, self.num_words), _ANYTHING, dtype=torch.int32)
        for line in range(count):
            for token_id in output[len(self._tokens) : start + line]:
                self._step(token_id)
            if self._matcher.is_terminated():
                masks[line] = self._only_eos
            elif self._num_taken == len(self._tokens):
                self._matcher.fill_next_token_bitmask(masks, line)
        return masks

    def _step(self, token_id: int) -> None:
        is_open = self._num_taken == len(self._tokens) and not self._matcher.is_terminated()
        self._num_taken += is_open and self._matcher.accept_token(token_id)
        self._tokens.append(token_id)

    def _go_back(self, num_tokens: int) -> None:
        if self._num_taken > num_tokens:
            self._matcher.rollback(self._num_taken - num_tokens)
            self._num_taken = num_tokens
        del self._tokens[num_tokens:]


def _source(wanted: StructuredOutputsParams) -> str:
    """What is compiled for it, as text."""
    if wanted.json is not None:
        return wanted.json if isinstance(wanted.json, str) else _schema_text(wanted.json)
    if wanted.choice is not None:  # JSON's escapes are GBNF's, but for pairs of surrogates
        return "root ::= " + " | ".join(json.dumps(text, ensure_ascii=False) for text in wanted.choice)
    if wanted.json_object:
        return '{"type": "object"}'
    text = wanted.regex if wanted.regex is not None else wanted.grammar
    assert text is not None
    return text


def _schema_text(schema: Mapping[str, Any]) -> str:
    try:
        return json.dumps(dict(schema))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"structured_outputs.json={_short(repr(schema))} is no JSON: {error}") from None


def _check_schema(schema: str) -> None:
    try:
        check_supported(json.loads(schema))
    except json.JSONDecodeError as error:
        raise ValueError(f"structured_outputs.json={_short(schema)} is no JSON: {error}") from None
    except RecursionError:
        raise ValueError(f"structured_outputs.json={_short(schema)} is nested too deeply: flatten it") from None


def _short(text: str) -> str:
    return repr(text) if len(text) <= 200 else f"{text[:200]!r}…"


def _message(error: Exception) -> str:
    """xgrammar's, without the time and the line of its source code."""
    return re.sub(r"^\[[\d:]+\] \S+:\d+: ", "", str(error)).strip()
