"""What a request does to its logits before a token is picked, as a function of the row's own prefix at each position.

Every tier applies the same rules to its own logits: for the token at position p, the tokens before p are the prefix,
whether they are committed, tentative or drafted. Nothing is remembered between calls, so a rejected token leaves no
trace; what grammars allow comes with the logits. The order is vLLM's (v1); step 7 is that of `sampler`:

    1 structured_outputs   ids that break the form of the text can't be picked
    2 allowed_token_ids    nor ids that are not listed
    3 bad_words            nor the last token of a sequence whose other tokens the output ends on
    4 min_tokens           nor EOS and stop tokens, until that many tokens are generated
    5 logit_bias           added
    6 penalties            repetition (prompt and output), then frequency, then presence (output only)
    7 temperature, min_p, top-k, top-p

Knows neither programs nor rows, only tokens and logits. A row's logits come out the same whatever its neighbours want.
"""

# Shape legend: R rows with rules, N tokens to pick of these rows, V vocabulary (perhaps trimmed), L longest row,
# K entries of a row's list, W bad words, P tokens before a bad word's last one, G words of a grammar's mask

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from infer.grammar import Grammar
from infer.params import SamplingParams

_ANY_TOKEN = -1  # pads a bad word's prefix on the left
_NO_TOKEN = -2  # stands before the output, and for no bad word at all: equals nothing


@dataclass(frozen=True, slots=True)
class Rules:
    """What one request asks for, in token ids."""

    num_prompt_tokens: int
    grammar: Grammar | None = None
    allowed: tuple[int, ...] | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    min_tokens: int = 0
    stop_ids: tuple[int, ...] = ()  # that can't be picked before min_tokens
    bias: dict[int, float] = field(default_factory=dict)
    repetition: float = 1.0
    frequency: float = 0.0
    presence: float = 0.0

    @classmethod
    def of(
        cls,
        params: SamplingParams,
        num_prompt_tokens: int,
        eos_token_ids: Collection[int],
        tokenizer: Any,
        grammar: Grammar | None = None,
    ) -> Self | None:
        """None if the request leaves its logits alone. As in vLLM, min_tokens holds EOS back under ignore_eos too.

        grammar: of params.structured_outputs, compiled.
        """
        rules = cls(
            num_prompt_tokens=num_prompt_tokens,
            grammar=grammar,
            allowed=None if params.allowed_token_ids is None else tuple(params.allowed_token_ids),
            bad_words=bad_word_ids(params.bad_words or (), tokenizer),
            min_tokens=params.min_tokens,
            stop_ids=tuple({*eos_token_ids, *(params.stop_token_ids or ())}) if params.min_tokens else (),
            bias=dict(params.logit_bias or {}),
            repetition=params.repetition_penalty,
            frequency=params.frequency_penalty,
            presence=params.presence_penalty,
        )
        is_idle = (
            rules.grammar is None and rules.allowed is None and not (rules.bad_words or rules.stop_ids or rules.bias)
        )
        return None if is_idle and not rules.has_penalty else rules

    @property
    def has_penalty(self) -> bool:
        return (self.repetition, self.frequency, self.presence) != (1, 0, 0)


def bad_word_ids(words: Sequence[str], tokenizer: Any) -> tuple[tuple[int, ...], ...]:
    """Each word's tokens as at the beginning of a text and, where a space makes another first token, inside of one."""
    sequences: list[tuple[int, ...]] = []
    for word in words:
        bare, spaced = (
            tuple(tokenizer(prefix + word.lstrip(), add_special_tokens=False)["input_ids"]) for prefix in ("", " ")
        )
        if not bare:
            raise ValueError(f"bad_words holds {word!r}, which has no tokens: remove it")
        sequences.append(bare)
        if spaced and spaced[0] != bare[0] and len(spaced) == len(bare):  # as vLLM decides it
            sequences.append(spaced)
    return tuple(sequences)


class Processors:
    """The rules of a batch's rows as tensors, for the vocabulary of one exit.

    Ids are mapped to columns of the logits; one column more, at V, takes whatever the vocabulary does not hold, so that
    padding and trimmed ids need no branch.
    """

    def __init__(
        self,
        rules: Sequence[Rules | None],
        num_columns: int,
        vocab: Tensor | None,
        device: torch.device,
    ) -> None:
        """
        rules: of every row of the batch.
        vocab: [V] int64 sorted ids of a trimmed exit, None for 0..V-1.
        """
        self.num_columns, self.device = num_columns, device
        self._vocab = vocab
        self._rows = [b for b, rule in enumerate(rules) if rule is not None]
        some = [rule for rule in rules if rule is not None]
        self._is_refused = ~((torch.arange(256).unsqueeze(1) >> torch.arange(8)) & 1).bool().to(device)  # of an octet
        self._num_prompt = self._tensor([r.num_prompt_tokens for r in some])  # [R]
        self._banned = self._banned_columns(some)  # [R, V+1] bool, or None
        self._stops = self._columns([r.stop_ids for r in some])  # [R, K]
        self._min_tokens = self._tensor([r.min_tokens for r in some])  # [R]
        self._biased = self._columns([list(r.bias) for r in some])  # [R, K]
        self._biases = _padded([list(r.bias.values()) for r in some], 0.0, torch.float32).to(device)  # [R, K]
        self._set_bad_words([r.bad_words for r in some])
        self._has_penalty = any(r.has_penalty for r in some)
        penalties = [(r.repetition, r.frequency, r.presence) for r in some]
        self._penalties = torch.tensor(penalties, dtype=torch.float32, device=device)  # [R, 3]

    def apply(
        self,
        logits: Tensor,
        texts: Sequence[Sequence[int]],
        starts: Sequence[int],
        counts: Sequence[int],
        masks: Mapping[int, Tensor] | None = None,
    ) -> Tensor:
        """The logits [N, V] that tokens are picked from; `logits` itself is left as it is.

        Row b of the batch has `counts[b]` lines, for the tokens at positions starts[b] + 1 and up; texts[b] are its
        tokens, at least up to the position before the last of these. masks[b] [counts[b], G] int32 on CPU: what its
        grammar, if it has one, allows on its lines.
        """
        lines, owners, positions = list[int](), list[int](), list[int]()
        first = 0
        slots = {b: slot for slot, b in enumerate(self._rows)}
        for b, (start, count) in enumerate(zip(starts, counts, strict=True)):
            if b in slots:
                lines += range(first, first + count)
                owners += [slots[b]] * count
                positions += range(start + 1, start + 1 + count)
            first += count
        tokens = _padded([texts[b] for b in self._rows], _NO_TOKEN, torch.int64).to(self.device)  # [R, L]
        owner, position = self._tensor(owners), self._tensor(positions)
        refused = self._refused(masks, counts) if masks else None
        if len(lines) == len(logits):
            return self._process(logits, owner, position, tokens, refused)
        line = self._tensor(lines)
        return logits.float().index_copy(0, line, self._process(logits[line], owner, position, tokens, refused))

    def _process(
        self, logits: Tensor, owner: Tensor, position: Tensor, tokens: Tensor, refused: Tensor | None
    ) -> Tensor:
        """[N, V] float32. owner [N]: whose line it is, of the R rows; position [N]: of the token to be picked; refused
        [N, V] bool: by the grammars."""
        num_prompt = self._num_prompt[owner]  # [N]
        out = torch.nn.functional.pad(logits.float(), (0, 1))  # [N, V+1], a copy
        if refused is not None:
            out[:, :-1].masked_fill_(refused, -torch.inf)
        if self._banned is not None:
            out.masked_fill_(self._banned[owner], -torch.inf)
        if self._bad_lasts.shape[1]:
            out.scatter_(1, self._completing(owner, position, num_prompt, tokens), -torch.inf)
        if self._stops.shape[1]:
            is_early = position - num_prompt < self._min_tokens[owner]  # [N]
            out.scatter_(1, self._stops[owner].where(is_early[:, None], self.num_columns), -torch.inf)
        if self._biased.shape[1]:
            out.scatter_add_(1, self._biased[owner], self._biases[owner])
        if self._has_penalty:
            self._penalize(out, owner, position, num_prompt, tokens)
        # A NaN says that the row is broken, which must show even where the id that has it can't be picked.
        is_broken = logits.amax(dim=-1, keepdim=True).isnan()
        return out[:, :-1].masked_fill(is_broken, torch.nan)

    def _penalize(self, out: Tensor, owner: Tensor, position: Tensor, num_prompt: Tensor, tokens: Tensor) -> None:
        index = torch.arange(tokens.shape[1], device=self.device)
        in_prefix = index < position[:, None]  # [N, L]
        in_output = in_prefix & (index >= num_prompt[:, None])
        columns = self._column_of(tokens)[owner].where(in_prefix, self.num_columns)  # [N, L]
        count = torch.zeros_like(out).scatter_add_(1, columns, in_output.float()).gather(1, columns)  # in the output
        repetition, frequency, presence = self._penalties[owner].unsqueeze(2).unbind(1)  # [N, 1] each
        value = out.gather(1, columns)
        value = torch.where(value > 0, value / repetition, value * repetition)
        value = value - frequency * count - presence * (count > 0)
        out.scatter_(1, columns, value)  # an id that stands there twice has equal values

    def _completing(self, owner: Tensor, position: Tensor, num_prompt: Tensor, tokens: Tensor) -> Tensor:
        """Columns [N, W] of the tokens that would complete a bad word; V if the output does not end on its prefix."""
        num_before = self._bad_prefixes.shape[2]
        index = position[:, None] - num_before + torch.arange(num_before, device=self.device)  # [N, P]
        tail = tokens[owner].gather(1, index.clamp(min=0)).where(index >= num_prompt[:, None], _NO_TOKEN)
        prefixes = self._bad_prefixes[owner]  # [N, W, P]
        is_hit = ((prefixes == tail[:, None]) | (prefixes == _ANY_TOKEN)).all(dim=2)
        return self._bad_lasts[owner].where(is_hit, self.num_columns)

    def _refused(self, masks: Mapping[int, Tensor], counts: Sequence[int]) -> Tensor:
        """Ids [N, V] bool that grammars refuse on the lines of the R rows."""
        num_words = next(iter(masks.values())).shape[1]  # G
        anything = {b: torch.full((counts[b], num_words), -1, dtype=torch.int32) for b in self._rows if b not in masks}
        each = {**anything, **masks}
        octets = torch.cat([each[b] for b in self._rows]).view(torch.uint8).to(self.device)  # [N, 4 G]
        refused = self._is_refused[octets.int()].flatten(1)  # [N, 32 G]
        return refused[:, : self.num_columns] if self._vocab is None else refused[:, self._vocab]

    # ---- tables ----

    def _set_bad_words(self, bad_words: Sequence[Sequence[tuple[int, ...]]]) -> None:
        """`_bad_lasts` [R, W]: columns of the last tokens; `_bad_prefixes` [R, W, P]: ids of those before them."""
        most = max((len(words) for words in bad_words), default=0)
        longest = max((len(word) for words in bad_words for word in words), default=1) - 1
        self._bad_lasts = self._columns([[word[-1] for word in words] for words in bad_words])
        prefixes = torch.full((len(bad_words), most, longest), _ANY_TOKEN)
        for row, words in enumerate(bad_words):
            for number, word in enumerate(words):
                if len(word) > 1:
                    prefixes[row, number, -(len(word) - 1) :] = torch.tensor(word[:-1])
        self._bad_prefixes = prefixes.to(self.device)

    def _banned_columns(self, rules: Sequence[Rules]) -> Tensor | None:
        if all(rule.allowed is None for rule in rules):
            return None
        banned = torch.zeros(len(rules), self.num_columns + 1, dtype=torch.bool, device=self.device)
        for row, rule in enumerate(rules):
            if rule.allowed is not None:
                banned[row] = True
                banned[row, self._column_of(self._tensor(rule.allowed))] = False
        return banned

    def _columns(self, ids: Sequence[Sequence[int]]) -> Tensor:
        return self._column_of(_padded(ids, _NO_TOKEN, torch.int64).to(self.device))

    def _column_of(self, ids: Tensor) -> Tensor:
        """Where the logits of `ids` stand, V for those that the vocabulary does not hold. Any shape."""
        if self._vocab is None:
            return ids.where((ids >= 0) & (ids < self.num_columns), self.num_columns)
        column = torch.searchsorted(self._vocab, ids).clamp(max=self.num_columns - 1)
        return column.where(self._vocab[column] == ids, self.num_columns)

    def _tensor(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)


def _padded(lists: Sequence[Sequence[float]], value: float, dtype: torch.dtype) -> Tensor:
    """[len(lists), longest]"""
    return pad_sequence([torch.tensor(x, dtype=dtype) for x in lists], batch_first=True, padding_value=value)
