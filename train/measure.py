"""`python -m train measure`: what validation says of exits and what the engine counts, on one and the same text.

The engine of an artifact answers the held-out prompts greedily and counts what its target accepts; then validation
counts on those very answers. Both walk the same rounds, so what differs is arithmetic: compiled programs against the
model that trains. More than that is a fault of one of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from infer.llm import LLM
from infer.manifest import Manifest
from infer.output import check_whole
from infer.params import SamplingParams
from infer.strategy import Policy
from infer.verify import mean_acceptance_length
from train.chat import Encoded
from train.counting import answered, count
from train.engine_author import read_manifest
from train.figures import TARGET
from train.model import EarlyExitModel
from train.module import EarlyExitModule


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The draft exit under `layerskip`, on one text."""

    exit: str
    num_tokens: int
    validated: list[float]  # [γ], share of rounds in which the first j + 1 drafts were accepted
    served: list[float]
    validated_length: float  # mean acceptance length
    served_length: float

    @property
    def largest_difference(self) -> float:
        """In points."""
        return 100 * max(abs(a - b) for a, b in zip(self.validated, self.served, strict=True))


def measure(module: EarlyExitModule, llm: LLM, rows: Sequence[Encoded], max_new_tokens: int) -> Measured:
    """Let `llm` answer the rows' prompts, then count on the answers.

    Args:
        llm: of an artifact of the module's own exits.
        rows: what stands before their first label is the prompt.

    Raises:
        ValueError: no prompt leaves room for an answer, or a request failed.
    """
    room = min(llm.manifest.limits.max_model_len, module.model.family.max_positions) - max_new_tokens
    prompts = [prompt for prompt in map(_prompt, rows) if 0 < len(prompt) <= room]
    if not prompts:
        raise ValueError(f"--max_new_tokens={max_new_tokens}: no held-out prompt leaves room for so many; lower it")
    gamma, draft = module.num_draft_tokens, module.model.exits[0].name
    llm.use("layerskip", Policy(num_draft_tokens=gamma))
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=max_new_tokens))
    check_whole(outputs)
    judged = [tier for output in outputs for tier in output.metrics.tiers]  # the target's alone
    num_rounds = sum(tier.num_drafts for tier in judged)
    texts = [list(output.outputs[0].token_ids) for output in outputs]
    counted = count(module, answered(prompts, texts, max_new_tokens)).acceptance[draft, TARGET]
    return Measured(
        exit=draft,
        num_tokens=sum(map(len, texts)),
        validated=counted.rates,
        served=[sum(sum(t.accepted_lengths[j + 1 :]) for t in judged) / max(1, num_rounds) for j in range(gamma)],
        validated_length=counted.length,
        served_length=mean_acceptance_length(sum(t.num_accepted for t in judged), num_rounds),
    )


def _prompt(row: Encoded) -> list[int]:
    return list(row.token_ids[: row.loss_mask.index(True)])


def check_artifact(path: Path, model: EarlyExitModel) -> Manifest:
    """Its manifest; ValueError unless the artifact has the model's exits."""
    manifest = read_manifest(path)
    have = [(e.name, e.layer, e.head, e.vocab_size, e.context) for e in manifest.exits if e.name != TARGET]
    want = [(e.name, e.layer, e.head, model.num_exit_ids(e.name), e.context) for e in model.exits]
    if have != want:
        raise ValueError(
            f"--artifact {path} has the exits {have} (name, layer, head, vocab_size, context), the config {want}: give "
            "the artifact that was made of model.warm_start"
        )
    return manifest


def table(found: Measured) -> Table:
    rows = Table(title=f"{found.exit}, {found.num_tokens} tokens, layerskip", title_justify="left")
    rows.add_column("")
    names = [f"{j} accepted" if j == 1 else f"first {j}" for j in range(1, len(found.served) + 1)]
    for name in (*names, "acceptance length"):
        rows.add_column(name, justify="right")
    for name, rates, length in (
        ("validation", found.validated, found.validated_length),
        ("engine", found.served, found.served_length),
    ):
        rows.add_row(name, *(f"{rate:.1%}" for rate in rates), f"{length:.3f}")
    return rows
