"""`python -m train probe`: how good an exit would be at each depth, before any is trained.

Linear heads are fitted on some training rows and scored on held-out ones, beside the untrained native heads. What they
would be worth is told by the figures of validation: rounds walked over the picks, calls priced by `train.costs`. Exits
that `model.warm_start` brings are scored on the same labels. This file knows nothing of how heads are fitted or tables
drawn.
"""

# Shape legend: N label positions, L layers of the base, V' ids that an exit can propose

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, NamedTuple

import torch
from torch import Tensor

from infer.strategy import Policy
from train.acceptance import Acceptance, Walk
from train.base_model import base_fingerprint
from train.chat import Encoded
from train.costs import check_costs, default_costs, measured_ratios, single_exit_speedup, walk_speedup
from train.data import DistillationDataModule
from train.depths import KINDS, Scores, exits_everywhere, fit_heads, score
from train.heads import ExitConfig, HeadKind, choose_draft_vocab
from train.measure import count
from train.module import EarlyExitModule
from train.probe_options import ProbeOptions
from train.ridge import Fit

_TUNING_SHARE = 5  # every fifth row to fit on chooses the ridge


# ---- rows ----


class Rows(NamedTuple):
    """No row of one part stands in another."""

    fit: list[Encoded]
    tuning: list[Encoded]
    scored: list[Encoded]


def choose_rows(training: Sequence[Encoded], held_out: Sequence[Encoded], num_tokens: int, seed: int) -> Rows:
    """Whole rows in random order until they hold `num_tokens` labels: of training for fit and tuning, of held-out."""
    known = {tuple(row.token_ids) for row in held_out}
    fresh = list({tuple(row.token_ids): row for row in training if tuple(row.token_ids) not in known}.values())
    chosen = _first(fresh, num_tokens, seed)
    if len(chosen) < 2:
        raise ValueError(
            f"--num_tokens={num_tokens} takes {len(chosen)} of {len(training)} training rows ({len(fresh)} of them not "
            "held out as well); a fit needs two: raise it, or give more data.train_files"
        )
    tuning = chosen[::_TUNING_SHARE]
    return Rows([row for n, row in enumerate(chosen) if n % _TUNING_SHARE], tuning, _first(held_out, num_tokens, seed))


def _first(rows: Sequence[Encoded], num_tokens: int, seed: int) -> list[Encoded]:
    order, chosen, num_labels = list(rows), [], 0
    random.Random(seed).shuffle(order)
    for row in order:
        if num_labels >= num_tokens:
            break
        chosen.append(row)
        num_labels += row.num_labels
    return chosen


# ---- what exits would be worth ----


class Exit(NamedTuple):
    """One head at one depth, against the target."""

    depth: int
    cost: float  # of one call, a share of a plain step
    agreement: float  # share of labels at which both pick the same id
    acceptance: float  # mean of 1 − TV at temperature 1
    acceptance_length: float  # 1 + accepted drafts of a greedy round
    speedup: float  # of `layerskip` with this exit alone


class TrainedExit(NamedTuple):
    """One exit of `model.warm_start`, against the target."""

    name: str
    head: HeadKind
    depth: int
    cost: float
    agreement: float  # at the first place of a window
    acceptance_length: float
    speedup: float


class Pair(NamedTuple):
    """Two linear heads under `hispec`."""

    draft: int
    intermediate: int
    speedup: float


@dataclass(frozen=True, kw_only=True)
class Probe:
    """All that `probe` has found."""

    base: Mapping[str, str | None]
    num_layers: int
    hidden_size: int
    num_labels: Mapping[str, int]  # fit, tuning, scored
    vocab_size: int  # ids that an exit can propose
    target_cost: float
    num_draft_tokens: int  # γ, at most, of a single exit's rounds
    policy: Policy  # of a pair's rounds
    exits: Mapping[HeadKind, list[Exit]]  # by depth
    fits: list[Fit]  # by depth
    pairs: list[Pair]
    trained: list[TrainedExit]  # by depth; empty without model.warm_start

    def best_exit(self, head: HeadKind = "linear") -> Exit:
        return max(self.exits[head], key=lambda exit_: exit_.speedup)

    @property
    def best_pair(self) -> Pair | None:
        """None for a base of two layers."""
        return max(self.pairs, key=lambda pair: pair.speedup, default=None)


def worth(
    scores: Scores, kind: HeadKind, costs: Sequence[float], target_cost: float, num_draft_tokens: int
) -> list[Exit]:
    """Every depth's exit; costs [L − 1]."""
    exits = []
    for n, (picks, cost) in enumerate(zip(scores.picks[kind], costs, strict=True)):
        counted = Acceptance(num_draft_tokens)
        counted.update(picks, scores.target, scores.breaks)
        speedup = single_exit_speedup(counted, cost, target_cost)
        accepted = float(scores.acceptance[kind][n])
        exits.append(Exit(n + 1, cost, counted.agreement, accepted, counted.length, speedup))
    return exits


def worth_of_pairs(scores: Scores, costs: Sequence[float], target_cost: float, policy: Policy) -> list[Pair]:
    """Every two depths with linear heads; costs [L − 1]."""
    pairs = []
    for draft, intermediate in combinations(range(len(costs)), 2):
        walk = Walk(policy, [0, 0, 0])
        picks = scores.picks["linear"]
        walk.update([picks[draft], picks[intermediate], scores.target], scores.breaks)
        speedup = walk_speedup(walk, [costs[draft], costs[intermediate], target_cost])
        pairs.append(Pair(draft + 1, intermediate + 1, speedup))
    return pairs


def worth_of_trained(module: EarlyExitModule, rows: Sequence[Encoded], costs: Mapping[str, float]) -> list[TrainedExit]:
    """The module's own exits, as validation counts them; costs by name, the target's included."""
    found = count(module, rows).named()
    return [
        TrainedExit(
            exit_.name,
            exit_.head,
            exit_.layer,
            costs[exit_.name],
            *(found[f"{exit_.name}/{figure}"] for figure in ("agreement", "acceptance_length", "speedup")),
        )
        for exit_ in module.model.exits
    ]


# ---- the command ----


def probe(
    module: EarlyExitModule, data: DistillationDataModule, options: ProbeOptions, costs: Mapping[str, float]
) -> Probe:
    """Fit and score exits at every depth of the module's base, where that stands.

    Args:
        module: of the config; its exits say which vocabulary is proposed, and at which depths `costs` were measured.
        data: with its rows read.
        costs: model.costs as the config gives it.
    """
    family = module.model.family
    if family.num_layers < 2:
        raise ValueError(f"model.base has num_layers={family.num_layers}: an exit needs a layer above it")
    names = [str(depth) for depth in range(1, family.num_layers)]
    check_costs(options.costs or {}, names, "--costs")
    vocab = _draft_vocab(module, data)
    models = {kind: exits_everywhere(module.model.base, kind, vocab) for kind in KINDS}
    rows = choose_rows(data.train_rows, data.val_rows, options.num_tokens, data.seed)
    fits = fit_heads(models["linear"], rows.fit, rows.tuning)
    scores = score(models, rows.scored)
    by_kind = {kind: _in_order(default_costs(model)) for kind, model in models.items()}
    ratios = _ratios(module, costs, by_kind["linear"], options.costs or {})
    priced = {kind: (own * measured_ratios(ratios, len(own))).tolist() for kind, own in by_kind.items()}
    target_cost = (options.costs or {}).get("target", costs.get("target", 1.0))
    policy = Policy()  # as in validation
    return Probe(
        base=base_fingerprint(module.model.base),
        num_layers=family.num_layers,
        hidden_size=family.hidden_size,
        num_labels={part: sum(row.num_labels for row in own) for part, own in rows._asdict().items()},
        vocab_size=family.vocab_size if vocab is None else len(vocab),
        target_cost=target_cost,
        num_draft_tokens=module.num_draft_tokens,
        policy=policy,
        exits={k: worth(scores, k, priced[k], target_cost, module.num_draft_tokens) for k in KINDS},
        fits=fits,
        pairs=worth_of_pairs(scores, priced["linear"], target_cost, policy),
        trained=worth_of_trained(module, rows.scored, module.costs) if module.is_warm else [],
    )


def _draft_vocab(module: EarlyExitModule, data: DistillationDataModule) -> Tensor | None:
    """The ids [V'] that the config's largest exit would propose, on the base's device; None: all."""
    sizes = [exit_.vocab_size for exit_ in module.model.exits]
    trimmed = [size for size in sizes if size is not None]
    if len(trimmed) < len(sizes):
        return None
    counts = data.label_counts(module.model.family.vocab_size)
    return choose_draft_vocab(counts, max(trimmed), module.model.eos_token_ids)


def _in_order(costs: Mapping[str, float]) -> Tensor:
    """[L − 1] float64, without the target's."""
    return torch.tensor([cost for name, cost in costs.items() if name != "target"], dtype=torch.float64)


def _ratios(
    module: EarlyExitModule, configured: Mapping[str, float], linear: Tensor, given: Mapping[str, float]
) -> dict[int, float]:
    """Depth → measured / default cost: of the config's exits with their own heads, or where it stands of `--costs`."""
    default = default_costs(module.model)
    exits: dict[str, ExitConfig] = {exit_.name: exit_ for exit_ in module.model.exits}
    ratios = {exits[name].layer: cost / default[name] for name, cost in configured.items() if name != "target"}
    own = {int(depth): cost / float(linear[int(depth) - 1]) for depth, cost in given.items() if depth != "target"}
    return ratios | own


def run(cli: Any, options: ProbeOptions) -> Probe:
    """`probe` for a config that LightningCLI has read, on the device that its trainer would use."""
    cli.model.model.place(cli.trainer.strategy.root_device)
    return probe(cli.model, cli.datamodule, options, cli.config["fit"]["model"]["costs"] or {})
