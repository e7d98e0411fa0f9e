"""The early-exit model: a base with an exit head at each configured depth.

One pass over the base serves all exits. Checkpoints of it are a folder `heads/` (DESIGN §9) that holds the heads, the
trimmed vocabularies and the base's identity, and never a base that is frozen; of one that is trained, what makes the
new reference model (`train.reference`). This file knows nothing of losses, data or Lightning.
"""

# Shape legend: B rows, T query positions, D hidden size, E exit size, V vocabulary

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from train.backbone import Backbone, Lora, add_adapters
from train.base_model import base_fingerprint, ending_ids
from train.base_pass import NOTHING, Asked, BasePass, hidden_after, prepare, run_base
from train.context import context_states, tokens_back
from train.family import Family
from train.heads import ExitConfig, ExitHead, check_draft_vocab, check_exits, exit_configs
from train.promise import Promise
from train.reference import Drift, write_reference
from train.shards import whole
from train.whole_folder import whole_folder

FORMAT_VERSION = 1


class ExitOutputs(NamedTuple):
    """States that are ready to be unembedded."""

    target: Tensor  # [B, T, E]
    exits: dict[str, Tensor]  # exit name → [B, T, E]
    depths: dict[int, Tensor]  # depth → [B, T, E] as the base itself reads it there; what was asked for


class EarlyExitModel(nn.Module):
    """Exits over a base, which is frozen unless `adapt` or `train_base` says otherwise.

    Args:
        base: the Hugging Face model, as `load_base` returns it.
        exits: ordered by depth.
        draft_vocabs: exit name → sorted ids [V'] int64, for the exits that are trimmed.

    Raises:
        ValueError: an exit lies outside the model, or a trimmed vocabulary lacks EOS.
    """

    def __init__(
        self, base: PreTrainedModel, exits: Sequence[ExitConfig], draft_vocabs: Mapping[str, Tensor] | None = None
    ) -> None:
        super().__init__()
        self.family = Family(base)
        check_exits(exits, self.family.num_layers, self.family.vocab_size)
        self.exits = tuple(exits)
        self.heads = nn.ModuleDict({e.name: ExitHead(self.family, e) for e in exits})
        self.mode: Backbone = "frozen"
        self.backbone: nn.Module | None = None  # what is trained of the base, and so part of `state_dict`
        self.adapted: list[str] = []  # names of the linear layers that have adapters
        self.draft_vocabs: dict[str, Tensor] = {}
        for name, ids in (draft_vocabs or {}).items():
            self.set_draft_vocab(name, ids)

    def adapt(self, lora: Lora) -> None:
        """Put adapters into the base, to be trained with the heads; they change nothing yet."""
        self.adapted = lora.targets(self.family, "model.lora")
        self.backbone, self.mode = add_adapters(self.base, lora.peft_config(self.adapted)), "lora"

    def train_base(self) -> PreTrainedModel:
        """All weights of the base are to be trained with the heads."""
        self.backbone, self.mode = self.base.requires_grad_(True), "full"
        return self.base

    @property
    def base(self) -> PreTrainedModel:
        """The base; reached through the family, so that a frozen one is no child and no part of `state_dict`."""
        return self.family.model

    @property
    def eos_token_ids(self) -> list[int]:
        return ending_ids(self.base.config, self.base.generation_config)

    @property
    def longest_context(self) -> int:
        """Tokens; serving has one context for all exits, and so has training. 0: no exit reads one."""
        return max(e.context for e in self.exits)

    def place(self, device: torch.device | str) -> Self:
        """Move everything: `to` reaches the heads alone, as the base is no child."""
        self.to(device)
        self.base.to(device)
        for name, ids in self.draft_vocabs.items():
            self.set_draft_vocab(name, ids)
        return self

    def set_draft_vocab(self, name: str, ids: Tensor) -> None:
        check_draft_vocab(name, ids, self.family.vocab_size, self.eos_token_ids)
        ids = ids.to(self.family.unembedding.device)
        # Equal ones are one tensor: the target's law on them is computed once (`train.linear_loss`)
        known = (own for own in self.draft_vocabs.values() if own.device == ids.device and torch.equal(own, ids))
        self.draft_vocabs[name] = next(known, ids)

    def num_exit_ids(self, name: str) -> int | None:
        """How many ids the exit proposes; None: all."""
        return len(self.draft_vocabs[name]) if name in self.draft_vocabs else None

    def missing_draft_vocabs(self) -> list[ExitConfig]:
        """Exits that ask for a trimmed vocabulary and have none yet."""
        return [e for e in self.exits if e.vocab_size is not None and e.name not in self.draft_vocabs]

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor | None = None,
        drafted: Tensor | None = None,
        draw: torch.Generator | None = None,
        asked: Asked = NOTHING,
    ) -> ExitOutputs:
        """The states of target and exits.

        Args:
            token_ids: [B, T] int64, padded on the right (causality hides the padding).
            positions: [B, T] int64 for packed rows, 0 where each begins: attention stays within a row, in the base's
                layers and in the exits' own. None: every row begins at column 0.
            drafted: [B, T] bool, the positions at which exits with a context may be given one; None: nowhere.
            draw: of the windows that say how far back it lies (`train.context.tokens_back`).
            asked: what else to give, and which layers to skip.
        """
        return self.outputs(self.base_pass(token_ids, positions, asked), drafted, draw)

    def base_pass(self, token_ids: Tensor, positions: Tensor | None = None, asked: Asked = NOTHING) -> BasePass:
        """The base's part of `forward`, for heads that are to run several times."""
        with self._unless_trained():
            return run_base(self.family, [e.layer for e in self.exits], token_ids, positions, asked)

    def outputs(
        self, passed: BasePass, drafted: Tensor | None = None, draw: torch.Generator | None = None
    ) -> ExitOutputs:
        """The exits' part of `forward`."""
        back = tokens_back(passed.positions, drafted, self.longest_context, draw)
        target, num_layers = self.target_states(passed.last), self.family.num_layers
        depths = {d: target if d == num_layers else self.target_states(hidden) for d, hidden in passed.depths.items()}
        return ExitOutputs(target, self.exit_states(passed, back), depths)

    def _unless_trained(self) -> Any:
        """No gradients through a base that is frozen."""
        return torch.no_grad() if self.mode == "frozen" else nullcontext()

    def exit_states(self, passed: BasePass, back: Tensor, *, only_context: bool = False) -> dict[str, Tensor]:
        """Exit name → [B, T, E].

        Args:
            back: [B, T] int64, how far back each position's context lies; 0 is none, as is what lies beyond an exit's
                own `context`.
            only_context: leave out the exits that read none.
        """
        states = {}
        for exit_, hidden in zip(self.exits, passed.below, strict=True):
            if exit_.context:  # detached: the target is not to be pulled towards the exits
                context = context_states(passed.last.detach(), back, exit_.context)
                hidden = torch.cat([hidden, context], dim=-1)
            if exit_.context or not only_context:
                # With `full`, LayerSkip's own losses train what a native exit reads
                with torch.no_grad() if self.mode == "full" and not exit_.trains else nullcontext():
                    states[exit_.name] = self.heads[exit_.name](hidden, passed.positions, **passed.attention)
        return states

    def hidden_after(self, layers: Iterable[int], token_ids: Tensor) -> Iterator[Tensor]:
        """The base's hidden states [B, T, D] before any norm, after each number of `layers`, ascending."""
        return hidden_after(self.family, layers, token_ids, *prepare(self.family, token_ids, None))

    def target_states(self, hidden: Tensor) -> Tensor:
        """After all layers: [.., D] → [.., E], ready to be unembedded."""
        with self._unless_trained():
            return self.family.project_out(self.family.final_norm()(hidden))

    def unembed(self, states: Tensor) -> Tensor:
        """[.., E] → the whole vocabulary's logits [.., V]."""
        return self.family.unembed(states)

    def unembed_exit(self, name: str, states: Tensor) -> Tensor:
        """[.., E] → logits over the exit's own ids [.., V']."""
        return self.exit_unembedding(name)(states)

    def exit_unembedding(self, name: str) -> Callable[[Tensor], Tensor]:
        """The function [.., E] → [.., V'] of an exit, for many calls: the trimmed matrix is gathered once.

        The unembedding is no exit's to train.
        """
        ids, weight = self.draft_vocabs.get(name), self.family.unembedding.detach()
        return partial(self.family.unembed, weight=weight if ids is None else weight[ids])

    def trainable_parameters(self) -> list[nn.Parameter]:
        """Of the heads."""
        return [p for p in self.heads.parameters() if p.requires_grad]

    def trainable_backbone(self) -> list[nn.Parameter]:
        return [] if self.backbone is None else [p for p in self.backbone.parameters() if p.requires_grad]

    def trained(self) -> dict[str, nn.Parameter]:
        """All that is trained, by name."""
        return {name: p for name, p in self.named_parameters() if p.requires_grad}

    # ---- the folder heads/ ----

    def save_heads(
        self,
        folder: str | os.PathLike[str],
        dtype: torch.dtype | None = None,
        drift: Drift | None = None,
        promise: Promise | None = None,
        *,
        writes: bool = True,
    ) -> None:
        """Write heads.safetensors, exits.json, the trimmed vocabularies and validation.json; the folder appears whole
        or not at all.

        Of a base that is trained also what makes the new reference model, with the record of it.

        Args:
            dtype: of the heads' weights in the file; None: as they are.
            drift: how far the new reference is from the base that training began with, where it was measured.
            promise: what validation says of these weights; None: they were not validated.
            writes: False on all processes but one: heads that are sharded are gathered by all together.
        """
        weights = {name: whole(w.detach()).to("cpu", dtype).contiguous() for name, w in self.heads.state_dict().items()}
        if not writes:
            return
        folder = Path(folder)
        folder.parent.mkdir(parents=True, exist_ok=True)
        with whole_folder(folder) as unfinished:
            save_file(weights, unfinished / "heads.safetensors")
            for name, ids in self.draft_vocabs.items():
                save_file({"draft_vocab": ids.cpu()}, unfinished / f"draft_vocab.{name}.safetensors")
            record = {
                "format_version": FORMAT_VERSION,
                "base": base_fingerprint(self.base),
                "exits": [e.record() for e in self.exits],
            }
            if self.mode != "frozen":
                record |= write_reference(unfinished, self.base, self.mode, drift)
            (unfinished / "exits.json").write_text(json.dumps(record, indent=2) + "\n")
            if promise is not None:
                promise.write(unfinished)

    def load_heads(self, folder: str | os.PathLike[str]) -> None:
        """Load weights and vocabularies of `folder` into this model's exits, which must be the same.

        Raises:
            ValueError: the folder is no heads folder, was made on another base, or has other exits.
        """
        folder = Path(folder)
        record = read_heads_record(folder)
        fingerprint = base_fingerprint(self.base)
        if record["base"]["config_sha256"] != fingerprint["config_sha256"]:
            if "backbone" in record:
                mode, begun = record["backbone"]["mode"], record["backbone"]["trained_from"]["name"]
                raise ValueError(
                    f"{folder}: the heads belong to a new reference model (model.backbone={mode}, from {begun!r}), "
                    f"which {fingerprint['name']!r} is not. Export builds it from that folder (--checkpoint); "
                    f"`python -m train merge --checkpoint {folder} --output DIR` writes it as a base to train over"
                )
            raise ValueError(
                f"{folder}: the heads were trained on {record['base']['name']!r}, whose config differs from that of "
                f"{fingerprint['name']!r}; give the same base"
            )
        stored = exit_configs(record["exits"])
        if tuple(stored) != self.exits:
            raise ValueError(
                f"{folder}: holds the exits {stored}, but the config asks for {list(self.exits)}; make them equal"
            )
        self.heads.load_state_dict(load_file(folder / "heads.safetensors"), strict=True)
        for exit_ in self.exits:
            path = folder / f"draft_vocab.{exit_.name}.safetensors"
            if path.exists():
                self.set_draft_vocab(exit_.name, load_file(path)["draft_vocab"])


def read_heads_record(folder: Path) -> dict:
    """The content of exits.json; ValueError when the folder or a file is missing or of another format."""
    for name in ("exits.json", "heads.safetensors"):
        if not (folder / name).is_file():
            raise ValueError(f"{folder}: {name} is missing; give the folder heads/ that `python -m train fit` wrote")
    try:
        record = json.loads((folder / "exits.json").read_text())
    except ValueError as error:
        raise ValueError(f"{folder}/exits.json: not valid JSON: {error}; train again") from error
    if record.get("format_version") != FORMAT_VERSION:
        raise ValueError(
            f"{folder}/exits.json: format_version {record.get('format_version')!r}, this code reads {FORMAT_VERSION}"
        )
    return record
