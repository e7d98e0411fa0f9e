"""SPRINTER: a small classifier stands in for most of the target's verdicts, so this strategy is LOSSY.

After every drafted token a logistic regression over the draft exit's law says whether the target would accept it. If
so, drafting goes on and the token is kept unverified; if not, or after γ tokens, the target is called, judges that last
token alone, and adds one of its own (Zhong, Teku, Tandon, arXiv 2502.04557). The paper's classifier reads the draft
model's last hidden state; this one reads four numbers of its law, so that it is fitted in a second from a few prompts.

What comes out is not what the target would have written. `LLM` refuses it without `allow_lossy`, and tables name it so.
"""

# Shape legend: N lines, V vocabulary (perhaps trimmed), F features

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Self

import torch
from torch import Tensor

from infer.artifact import SPRINTER, Artifact, write_unrecorded
from infer.judging import IdentityRule, Ruling
from infer.lines import Lines
from infer.records import MAX_JSON, load_json, read_record
from infer.row import Row
from infer.verify import Verdict, verify

FORMAT_VERSION = 1
FIT_AGAIN = "fit one with python -m infer calibrate-sprinter ARTIFACT (see --help)"
FEATURES = ("log_probability", "largest_log_probability", "margin", "entropy")


def features(logits: Tensor, token_ids: Sequence[int], ids: Tensor | None) -> Tensor:
    """[N, F] float64 of the exit's law at temperature 1, and of the token that was taken from it.

    logits: [N, V]; token_ids: N; ids: [V], the real ids of a trimmed vocabulary
    """
    law = logits.double().log_softmax(dim=-1)
    tokens = torch.tensor(token_ids, device=logits.device)
    columns = tokens if ids is None else torch.searchsorted(ids, tokens).clamp(max=len(ids) - 1)
    top = law.topk(2, dim=-1).values
    entropy = -(law.exp() * law.clamp(min=-1e9)).sum(dim=-1)  # 0 · −inf of a forbidden id is no entropy
    own = law.gather(1, columns.unsqueeze(1)).squeeze(1)
    return torch.stack([own, top[:, 0], top[:, 0] - top[:, 1], entropy], dim=1).clamp(-1e9, 1e9)


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """What one threshold does to drafted tokens that the fit has not seen."""

    threshold: float
    kept: float  # share of them that it keeps without the target
    right: float  # share of those that the target would have accepted


@dataclass(frozen=True, kw_only=True, slots=True)
class Classifier:
    """sprinter.json: which drafted tokens to keep unverified.

    A token is kept where the logistic function of weights · (features − means) ÷ scales + bias reaches `threshold`.
    """

    artifact_sha256: str  # of hispec.json: the exits whose laws it has seen
    feature_names: list[str]
    means: list[float]
    scales: list[float]
    weights: list[float]
    bias: float
    threshold: float
    num_samples: int
    settings: list[Setting]  # what other thresholds would have done
    format_version: int = FORMAT_VERSION

    def __post_init__(self) -> None:
        sizes = [len(self.means), len(self.scales), len(self.weights)]
        if self.feature_names != list(FEATURES) or sizes != [len(FEATURES)] * 3 or min(self.scales) <= 0:
            raise ValueError(f"{SPRINTER}: its features are not {', '.join(FEATURES)}; {FIT_AGAIN}")

    def chances(self, values: Tensor) -> Tensor:
        """[N] that the target would accept, of features [N, F]; NaN where these are."""
        means, scales, weights = values.new_tensor([self.means, self.scales, self.weights])
        return ((values - means) / scales @ weights + self.bias).sigmoid()

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Self:
        """ValueError when it is malformed."""
        classifier: Self = read_record(cls, load_json(text, SPRINTER, FIT_AGAIN), SPRINTER, FIT_AGAIN)
        if classifier.format_version != FORMAT_VERSION:
            raise ValueError(
                f"{SPRINTER}: format_version={classifier.format_version}, not {FORMAT_VERSION}; {FIT_AGAIN}"
            )
        return classifier


def read_classifier(artifact: Artifact) -> Classifier:
    """The artifact's classifier.

    Raises:
        ValueError: there is none, it is malformed, or was fitted to another artifact.
    """
    path = artifact.path / SPRINTER
    if not path.is_file() or path.stat().st_size > MAX_JSON:
        raise ValueError(f"strategy='sprinter' needs {path}; {FIT_AGAIN}")
    classifier = Classifier.from_json(path.read_text(encoding="utf-8"))
    if classifier.artifact_sha256 != artifact.manifest_sha256:
        raise ValueError(f"{path} was fitted to another artifact; {FIT_AGAIN}")
    return classifier


def write_classifier(artifact: Artifact, classifier: Classifier) -> None:
    """It appears complete, or what was there before stays."""
    write_unrecorded(artifact.path, SPRINTER, classifier.to_json())


class SprinterRule(IdentityRule):
    """Keeps what the classifier trusts; what it does not is judged as by the identity rule."""

    def __init__(self, classifier: Classifier) -> None:
        super().__init__()
        self._classifier = classifier

    def begin(self, rows: Sequence[Row]) -> None:
        self.doubted = set()

    def judge(self, lines: Lines) -> Ruling:
        picks = self.picks(lines)
        if not lines.is_target:
            ruling = self.ruling(lines, picks)
            values = features(lines.logits, [max(token, 0) for token in picks], lines.ids)
            chances = self._classifier.chances(values).tolist()
            # A stage that drafts has a line per row; one without a law gives NaN, which no threshold reaches
            trusted = {
                row for row, chance in zip(lines.rows, chances, strict=True) if chance >= self._classifier.threshold
            }
            self.doubted |= set(lines.rows) - trusted
            return ruling
        verdicts, first = [], 0
        for row, drafted, count in zip(lines.rows, lines.drafted, lines.counts, strict=True):
            num_trusted = len(drafted) - (row in self.doubted and len(drafted) > 0)
            verdicts.append(keep(drafted, picks[first : first + count], num_trusted))
            first += count
        return Ruling(verdicts, [token < 0 for token in picks] if min(picks) < 0 else None)


def keep(drafted: Sequence[int], picks: Sequence[int], num_trusted: int) -> Verdict:
    """Accept the first `num_trusted` tokens whatever the judge picks, and verify the others.

    Where the judge has no pick (-1), its logits were broken, and nothing is kept from there on.
    """
    if -1 in picks[:num_trusted]:
        return Verdict(picks.index(-1), -1)
    rest = verify(drafted[num_trusted:], picks[num_trusted:])
    return rest._replace(num_accepted=num_trusted + rest.num_accepted)
