"""Exit heads: what turns the hidden states at a depth into states that an unembedding can read.

Four kinds (DESIGN §4): `native` trains nothing and uses the base's own final norm; `linear` is `h + W h` with a norm
of its own; `layer` is one more decoder layer of the base's own class with a norm of its own; `linear_layer` is
`h + W h` before such a layer. A head with a decoder layer may read the target's last hidden state as well (`Entry`).
This file knows nothing of training loops, tiers or pages: a decoder layer attends through whatever attention function
its family has chosen.
"""

# Shape legend: B rows, T query positions, D hidden size, E exit size, V vocabulary

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from train.family import Family
from train.losses import KL, ExitLoss

HeadKind = Literal["native", "linear", "layer", "linear_layer"]
HEAD_KINDS: tuple[HeadKind, ...] = ("native", "linear", "layer", "linear_layer")


@dataclass(frozen=True, kw_only=True)
class ExitConfig:
    """One exit of the early-exit model.

    Args:
        name: what tiers and reports call it, `draft` or `intermediate` in the usual two-exit model.
        layer: number of base layers below the exit, 1 ≤ layer < num_layers.
        head: `native`, `linear`, `layer` or `linear_layer`.
        vocab_size: number of token ids that the exit can propose, chosen by counting the target's own outputs; None
            keeps the whole vocabulary.
        context: with more than 0 the head also reads the target's hidden state of the last token that the target has
            verified, and training shows it states that lie up to so many tokens back. For heads with a decoder layer.
        loss: what the exit is trained for; None means {kl: 1.0}. Not part of what a checkpoint must agree with.
    """

    name: str
    layer: int
    head: HeadKind = "layer"
    vocab_size: int | None = None
    context: int = 0
    loss: ExitLoss | None = field(default=None, compare=False)

    @property
    def training_loss(self) -> ExitLoss:
        return self.loss or KL

    @property
    def trains(self) -> bool:
        return self.head != "native"

    @property
    def has_layer(self) -> bool:
        return self.head in ("layer", "linear_layer")

    def record(self) -> dict[str, Any]:
        """What a checkpoint must agree with, as plain types."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.compare}


def check_exits(exits: Sequence[ExitConfig], num_layers: int, vocab_size: int) -> None:
    """Raise ValueError naming the field unless exits are ordered by depth and lie inside the model."""
    if not exits:
        raise ValueError("exits is empty: give at least one exit, e.g. {name: draft, layer: 2, head: layer}")
    below = 0
    for exit_ in exits:
        where = f"exits.{exit_.name}"
        if exit_.name == "target" or [e.name for e in exits].count(exit_.name) > 1:
            raise ValueError(
                f"{where}: the name {exit_.name!r} is taken; exit names are unique, and 'target' is the base's own"
            )
        if not exit_.name.isidentifier():
            raise ValueError(f"{where}: the name must be a plain word, since files are named after it")
        if not 1 <= exit_.layer < num_layers:
            raise ValueError(
                f"{where}.layer={exit_.layer} must lie between 1 and {num_layers - 1}: the base has {num_layers} layers"
            )
        if exit_.layer <= below:
            raise ValueError(
                f"{where}.layer={exit_.layer} must be deeper than the exit before it ({below}): list exits by depth"
            )
        if exit_.head not in HEAD_KINDS:
            raise ValueError(f"{where}.head={exit_.head!r} must be one of {', '.join(HEAD_KINDS)}")
        if exit_.vocab_size is not None and not 2 <= exit_.vocab_size <= vocab_size:
            raise ValueError(
                f"{where}.vocab_size={exit_.vocab_size} must lie between 2 and the base's {vocab_size}, or be null"
            )
        if exit_.context < 0 or (exit_.context and not exit_.has_layer):
            raise ValueError(
                f"{where}.context={exit_.context} must be a number of tokens, 0 for none, and goes with the heads "
                f"layer and linear_layer (head={exit_.head!r})"
            )
        exit_.training_loss.check(f"{where}.loss")
        below = exit_.layer


class Entry(nn.Module):
    """What a head does with its input before its decoder layer: `h + W h + C norm(f)`, or a part of that.

    f is the target's hidden state of the last verified token, zeros where there is none. W and C are zero at the start,
    so that the untrained head is the decoder layer alone; `train.closed_form` finds better ones.
    """

    def __init__(self, hidden_size: int, norm: nn.Module | None, has_linear: bool) -> None:
        """norm: the context's own, None where the head reads none."""
        super().__init__()
        self.linear = zero_linear(hidden_size) if has_linear else None
        self.context_norm = norm
        self.context_linear = zero_linear(hidden_size) if norm is not None else None

    def forward(self, x: Tensor) -> Tensor:
        """x [.., D], or [.., 2 D] with the context behind the hidden states → [.., D]."""
        if self.context_linear is None or self.context_norm is None:
            return self._mapped(x)
        # copies, as export would write rules about T into a program that matrix products of views stand in
        hidden, context = (part.clone(memory_format=torch.contiguous_format) for part in x.chunk(2, dim=-1))
        return self._mapped(hidden) + self.context_linear(self.context_norm(context))

    def _mapped(self, hidden: Tensor) -> Tensor:
        return hidden if self.linear is None else hidden + self.linear(hidden)


def zero_linear(size: int) -> nn.Linear:
    linear = nn.Linear(size, size, bias=False)
    nn.init.zeros_(linear.weight)
    return linear


class ExitHead(nn.Module):
    """Hidden states at the exit's depth → states that the unembedding reads.

    The frozen parts (the base's norm of a `native` head, OPT's output projection) stay the family's: `state_dict` holds
    what is trained and nothing else.
    """

    def __init__(self, family: Family, config: ExitConfig) -> None:
        super().__init__()
        self.config = config
        self._family = family  # not a Module: the base is no child of a head
        # the untrained head is the native one
        self.linear = zero_linear(family.hidden_size) if config.head == "linear" else None
        self.entry: Entry | None = None
        self.layer: nn.Module | None = None
        self.norm: nn.Module | None = None
        if config.has_layer:
            # the last layer is the one that knows how to speak to the final norm
            self.layer = family.new_layer(like=family.num_layers - 1)
        if config.head == "linear_layer" or config.context:
            norm = copy.deepcopy(family.final_norm()).requires_grad_(True) if config.context else None
            self.entry = Entry(family.hidden_size, norm, has_linear=config.head == "linear_layer")
        if config.trains:
            self.norm = copy.deepcopy(family.final_norm()).requires_grad_(True)
        self.to(family.unembedding.device)

    def forward(self, hidden: Tensor, positions: Tensor, **attention: Any) -> Tensor:
        """hidden [B, T, D], with a context [B, T, 2 D]; positions [B, T] → [B, T, E].

        `attention` reaches the decoder layer's attention function.
        """
        hidden = self._cast(hidden)
        if self.entry is not None:
            hidden = self.entry(hidden)
        if self.layer is not None:
            hidden = self._family.run_each([self.layer], hidden, positions, **attention)
        return self.readout(hidden)

    def readout(self, hidden: Tensor) -> Tensor:
        """What follows the decoder layer: [.., D] → [.., E]."""
        hidden = self._cast(hidden)
        if self.linear is not None:
            hidden = hidden + self.linear(hidden)
        norm = self._family.final_norm() if self.norm is None else self.norm
        return self._family.project_out(norm(hidden).to(self._family.unembedding.dtype))

    def _cast(self, hidden: Tensor) -> Tensor:
        return hidden if self.dtype is None else hidden.to(self.dtype)

    @property
    def dtype(self) -> torch.dtype | None:
        """Of the head's own weights, which in training is float32 whatever the base's is; None where it has none."""
        own = next(self.parameters(), None)
        return None if own is None else own.dtype


def choose_draft_vocab(counts: Tensor, size: int, always: Sequence[int]) -> Tensor:
    """The `size` most frequent token ids, sorted ascending, `always` (EOS ids) among them.

    Args:
        counts: [V] int64, how often each id occurs in the target's own outputs. Ties go to the lower id.
        size: number of ids to keep.
        always: ids that are kept whatever their count.
    """
    ranked = counts.clone()
    ranked[torch.tensor(list(always), dtype=torch.long)] = torch.iinfo(torch.int64).max
    return torch.sort(ranked, descending=True, stable=True).indices[:size].sort().values


def check_draft_vocab(name: str, ids: Tensor, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
    """Raise ValueError unless ids [V'] are sorted, unique, inside the vocabulary and hold every EOS id."""
    if ids.dtype != torch.int64 or ids.ndim != 1 or len(ids) == 0:
        raise ValueError(
            f"draft_vocab.{name}: expected a list of int64 ids, got {ids.dtype} of shape {tuple(ids.shape)}"
        )
    if bool((ids[1:] <= ids[:-1]).any()) or int(ids[0]) < 0 or int(ids[-1]) >= vocab_size:
        raise ValueError(f"draft_vocab.{name}: ids must ascend strictly within 0..{vocab_size - 1}")
    missing = set(eos_token_ids) - set(ids.tolist())
    if missing:
        raise ValueError(f"draft_vocab.{name}: lacks the EOS ids {sorted(missing)}, so a draft could never end")


def exit_configs(records: Sequence[Mapping[str, Any]]) -> list[ExitConfig]:
    """Exits from plain mappings (`exits.json`, YAML); an unknown or missing key is a ValueError that names it."""
    exits = []
    for number, record in enumerate(records):
        where = f"exits[{number}]"
        missing = {"name", "layer"} - set(record)
        if missing:
            raise ValueError(f"{where}: missing key {sorted(missing)[0]!r}; an exit has {_keys(ExitConfig)}")
        exit_ = _record(ExitConfig, where, record)
        if isinstance(exit_.loss, Mapping):
            exit_ = replace(exit_, loss=_record(ExitLoss, f"{where}.loss", exit_.loss))
        exits.append(exit_)
    return exits


def _record(kind: type, where: str, values: Mapping[str, Any]) -> Any:
    unknown = set(values) - {f.name for f in fields(kind)}
    if unknown:
        raise ValueError(f"{where}: unknown key {sorted(unknown)[0]!r}; expected some of {_keys(kind)}")
    return kind(**values)


def _keys(kind: type) -> str:
    return ", ".join(sorted(f.name for f in fields(kind)))
