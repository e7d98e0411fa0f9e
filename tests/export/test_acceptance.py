"""The gate of acceptance: what keeps validation's promise passes, and whatever costs drafts is stopped."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from export import acceptance, bitwise
from export.acceptance import MAX_SHORTFALL, Counter, Kept, Rates
from export.cli import main
from export.parity import Caller, ParityError
from export.programs import tier_spans
from export.writer import ExportOptions, write_artifact
from infer import backends
from infer.artifact import Artifact
from infer.cli import main as infer_main
from infer.draft_vocab import read_draft_vocabs
from infer.llm import LLM
from tests.tiny_artifact import VOCAB_SIZE, make_tokenizer
from tests.tiny_engine import DEVICE
from tests.tiny_models import make_tiny_model
from train.chat import Encoded
from train.counting import promise
from train.heads import ExitConfig
from train.module import EarlyExitModule
from train.promise import FILE, Promise

EXITS = [
    ExitConfig(name="draft", layer=2, head="linear_layer", context=2, vocab_size=VOCAB_SIZE // 2),
    ExitConfig(name="intermediate", layer=3, head="linear"),
]
GAMMA = 3


class Made:
    """Heads with a promise in `folder`/heads, and their artifact, whose programs are loaded."""

    def __init__(self, folder: Path) -> None:
        base = make_tiny_model("llama", vocab_size=VOCAB_SIZE, eos_token_id=0, pad_token_id=0, num_hidden_layers=4)
        with torch.no_grad():  # upper layers that add little, so that drafts are often right
            for layer in base.model.layers[2:]:
                layer.self_attn.o_proj.weight.mul_(0.3)
                layer.mlp.down_proj.weight.mul_(0.3)
        base.save_pretrained(folder / "base")
        make_tokenizer().save_pretrained(folder / "base")
        self.module = EarlyExitModule(str(folder / "base"), EXITS, num_draft_tokens=GAMMA)
        self.model = self.module.model
        self.model.set_draft_vocab("draft", torch.arange(0, VOCAB_SIZE, 2))
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for name, parameter in self.model.heads.named_parameters():
                if name.endswith(("o_proj.weight", "down_proj.weight")):
                    parameter.mul_(0.3)
                parameter.add_(0.01 * torch.randn(parameter.shape, generator=generator))
            entry: Any = self.model.heads["draft"].entry  # enough of a context to change what is drafted
            entry.context_linear.weight.copy_(0.3 * torch.eye(self.model.family.hidden_size))
        self.rows = texts()
        found = promise(self.module, self.rows)
        assert found is not None
        self.model.save_heads(folder / "heads", promise=found)
        read = Promise.read(folder / "heads")
        assert read is not None
        self.folder, self.promise = folder, read
        self.model.eval().requires_grad_(False)
        self.options = ExportOptions(
            output=folder / "artifact", max_model_len=128, block_size=4, prefill_chunk=16, device=str(DEVICE),
            promise=read,
        )  # fmt: skip
        with pytest.MonkeyPatch.context() as patch:  # sizes are measured, not required, and would take most time
            patch.setattr(bitwise, "SHAPES", bitwise.SHAPES[:4])
            write_artifact(lambda dtype: self.model, make_tokenizer(), self.options)
        self.artifact = Artifact.open(folder / "artifact")
        self.set = self.artifact.select("eager", device=str(DEVICE))
        self.programs = backends.load(self.artifact, self.set)

    def check(self, kept: Promise, counted: dict[str, Any] | None = None, engine: dict[str, Any] | None = None) -> Any:
        """The gate, with other programs in the place of some: for the count, and for the engine."""
        manifest = self.artifact.manifest
        caller = Caller(
            programs=self.programs | (counted or {}),
            infos=self.set.build.programs,
            spans=tier_spans(self.model),
            contexts=["draft"],
            block_size=manifest.block_size,
            num_kv_heads=manifest.base.num_kv_heads,
            head_dim=manifest.base.head_dim,
            dtype=torch.float32,
            device=DEVICE,
        )
        counter = Counter(
            caller=caller,
            exits=manifest.exits[:-1],
            draft_vocabs=read_draft_vocabs(self.artifact, str(DEVICE)),
            prefill_chunk=manifest.limits.prefill_chunk,
            max_model_len=manifest.limits.max_model_len,
        )

        def make_llm(num_blocks: int, max_num_seqs: int) -> LLM:
            return LLM(
                self.artifact, "layerskip", device=str(DEVICE), num_blocks=num_blocks, max_num_seqs=max_num_seqs,
                programs=self.programs | (engine or {}),
            )  # fmt: skip

        return acceptance.check(counter, make_llm, "eager float32", kept)


def texts() -> list[Encoded]:
    """Rows that end before, on and behind the edge of a chunk; the last with two stretches of labels."""
    draw = torch.Generator().manual_seed(0)
    lengths = (16, 33, 40, 47, 48, 50, 57, 64)
    rows = [torch.randint(1, VOCAB_SIZE, (n,), generator=draw).tolist() for n in lengths]
    masks = [[False] * 6 + [True] * (len(row) - 6) for row in rows]
    masks[-1][20:30] = [False] * 10
    return [Encoded(row, mask) for row, mask in zip(rows, masks, strict=True)]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Made]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(acceptance, "NUM_TOKENS", 40)
        yield Made(tmp_path_factory.mktemp("acceptance"))


def test_programs_keep_to_the_count_what_the_model_promised_and_the_engine_what_they_promise(
    made: Made, capsys: pytest.CaptureFixture[str]
) -> None:
    report = json.loads((made.artifact.path / "parity.json").read_text())["acceptance"][made.set.build.folder_name]
    assert [(one["exit"], one["by"]) for one in report] == [
        ("draft", "programs"), ("intermediate", "programs"), ("draft", "engine"),
    ]  # fmt: skip
    for one in report[:2]:
        assert one["found"] == one["expected"], "float32, the same text"
        assert 0.1 < one["found"]["agreement"] < 0.9, "a test of nothing"
    engine = report[2]
    assert 0.1 < engine["found"]["rates"][0] < 0.9 and engine["found"]["num_rounds"] > 100
    assert engine["found"]["rates"] == pytest.approx(engine["expected"]["rates"], abs=0.02)
    assert infer_main(["inspect", str(made.artifact.path)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "acceptance by the target" in shown and f"{100 * report[0]['found']['agreement']:.1f}" in shown


def more(kept: Promise, points: float) -> Promise:
    """A promise of so many more matches of the intermediate exit."""
    rows = []
    for row in kept.rows:
        counts = list(row.counts["intermediate"])
        counts[0] += round(points / 100 * counts[1])
        rows.append(replace(row, counts=row.counts | {"intermediate": counts}))
    return replace(kept, rows=rows)


@pytest.mark.parametrize(("points", "stops"), [(4, True), (-30, False)])
def test_less_than_was_promised_is_stopped_and_more_is_not(made: Made, points: float, stops: bool) -> None:
    if not stops:
        assert made.check(more(made.promise, points))[1].shortfall <= 0
        return
    with pytest.raises(ParityError, match=r"exit intermediate keeps less than validation promised.*at most 2 are"):
        made.check(more(made.promise, points))


def test_chance_is_allowed_to_the_engine_whose_rounds_are_others_and_not_to_a_count_of_the_same_rounds() -> None:
    half, less = (Rates(agreement=None, rates=[rate], length=1 + rate, num_rounds=400) for rate in (0.52, 0.48))
    engine = Kept(exit="draft", by="engine", expected=half, found=less)
    programs = replace(engine, by="programs")
    assert engine.shortfall == pytest.approx(4.0) and programs.allowed == MAX_SHORTFALL < engine.shortfall
    assert engine.allowed == pytest.approx(MAX_SHORTFALL + 2.5)  # √(½ · ½ / 400)
    none = replace(engine, found=replace(less, num_rounds=0))
    assert none.allowed == MAX_SHORTFALL


def test_an_exit_that_always_agrees_is_counted_as_the_engine_has_room_for_it(made: Made) -> None:
    """Every answer ends at its limit: 40 tokens are ten rounds of three drafts and the target's own."""

    def always(index: int, size: int) -> Callable[[torch.Tensor], torch.Tensor]:
        logits = torch.zeros(size, device=DEVICE)
        logits[index] = 9.0
        return lambda states: logits.expand(*states.shape[:-1], size)

    same = {"draft.unembed": always(1, VOCAB_SIZE // 2), "unembed": always(2, VOCAB_SIZE)}  # both are id 2
    for num_tokens, num_rounds in ((40, 10), (41, 10), (42, 11), (39, 10)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(acceptance, "NUM_TOKENS", num_tokens)
            kept = made.check(made.promise, counted=same, engine=same)[2]
        assert kept.found == kept.expected and kept.shortfall == 0
        assert kept.found.num_rounds == num_rounds * len(
            acceptance.choose_prompts([row.encoded for row in made.promise.rows], 128)
        )


def test_an_exit_that_drafts_other_tokens_is_stopped(made: Made) -> None:
    unembed = made.programs["draft.unembed"]

    def shifted(states: torch.Tensor) -> torch.Tensor:
        return unembed(states).roll(1, dims=-1)

    with pytest.raises(ParityError, match="exit draft keeps less than validation promised: on its text its programs"):
        made.check(made.promise, counted={"draft.unembed": shifted})


def test_an_engine_that_drafts_from_wrong_states_is_stopped_though_its_tokens_are_right(made: Made) -> None:
    draft = made.programs["draft.exit"]

    def shifted(x: torch.Tensor, *rest: Any) -> torch.Tensor:
        return draft(x.roll(1, dims=-1), *rest)

    with pytest.raises(ParityError, match="on texts of its own the engine accepts"):
        made.check(made.promise, engine={"draft.exit": shifted})


def test_what_the_gate_stops_is_not_written(made: Made, tmp_path: Path) -> None:
    options = replace(made.options, output=tmp_path / "artifact", promise=more(made.promise, 10))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bitwise, "SHAPES", bitwise.SHAPES[:2])
        with pytest.raises(ParityError, match="no artifact was written"):
            write_artifact(lambda dtype: made.model, make_tokenizer(), options)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_heads_without_a_promise_are_told_and_exported(
    made: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bitwise, "SHAPES", bitwise.SHAPES[:2])
    made.model.save_heads(tmp_path / "heads")
    output = tmp_path / "artifact"
    arguments = ["--checkpoint", str(tmp_path / "heads"), "--output", str(output), "--backend", "eager"]
    assert main([*arguments, "--max-model-len", "64"]) == 0
    assert "no validation.json with the heads: acceptance is not checked" in capsys.readouterr().out
    assert json.loads((output / "parity.json").read_text())["acceptance"] == {}
    assert infer_main(["inspect", str(output)]) == 0
    assert "no figures: acceptance by the target" in capsys.readouterr().out


def test_a_promise_of_other_weights_exits_or_another_base_is_refused_before_any_work(
    made: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    heads = tmp_path / "heads"
    made.model.save_heads(heads)
    (heads / FILE).write_text((made.folder / "heads" / FILE).read_text())
    assert Promise.read(heads) is not None, "the same weights"
    with torch.no_grad():
        made.model.heads["draft"].norm.weight.add_(1)  # type: ignore[union-attr, operator]
        made.model.save_heads(heads)
        made.model.heads["draft"].norm.weight.sub_(1)  # type: ignore[union-attr, operator]
    (heads / FILE).write_text((made.folder / "heads" / FILE).read_text())
    assert main(["--checkpoint", str(heads), "--output", str(tmp_path / "artifact"), "--backend", "eager"]) == 2
    assert "tells of other weights than those beside it" in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"promises of exits \['draft', 'intermediate'\], the heads have \['draft'\]"):
        acceptance.check_promise(made.promise, ["draft"], VOCAB_SIZE, 2048)
    names = made.promise.exits
    for vocab_size, max_positions in ((100, 2048), (VOCAB_SIZE, 60)):
        with pytest.raises(ValueError, match=rf"rows\[\d\] has .* the base takes {max_positions} up to"):
            acceptance.check_promise(made.promise, names, vocab_size, max_positions)


def spoil(record: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return record | changes


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda r: spoil(r, num_draft_tokens=0), "num_draft_tokens=0"),
        (lambda r: spoil(r, num_draft_tokens=64), r"num_draft_tokens=64 must lie in \[1, 63\]"),
        (lambda r: spoil(r, format_version=2), "format_version=2"),
        (lambda r: spoil(r, rows=[]), "must not be empty"),
        (lambda r: spoil(r, extra=1), "'extra' is unknown"),
        (lambda r: r["rows"][0].update(token_ids=[1, -1] * 40), "negative"),
        (lambda r: r["rows"][0].update(labels=[[9, 3]]), "in order"),
        (lambda r: r["rows"][0].update(labels=[[1, 4000]]), "stretches"),
        (lambda r: r["rows"][0]["counts"].pop("draft"), "counts are of"),
        (lambda r: r["rows"][0]["counts"].update(draft=[9, 8, 1, 1, 1, 1]), "are none of"),
        (lambda r: r["rows"][0]["counts"].update(draft=[1, 8, 1, 1, 2, 1]), "are none of"),
        (lambda r: r["rows"][0]["counts"].update(draft=[1, 8, 1]), "are none of"),
    ],
)
def test_a_record_that_contradicts_itself_is_refused(
    made: Made, tmp_path: Path, change: Callable[[dict[str, Any]], Any], words: str
) -> None:
    record = json.loads((made.folder / "heads" / FILE).read_text())
    changed = change(record)
    (tmp_path / FILE).write_text(json.dumps(changed if isinstance(changed, dict) and "rows" in changed else record))
    with pytest.raises(ValueError, match=words) as caught:
        Promise.read(tmp_path)
    assert "python -m train promise" in str(caught.value)
