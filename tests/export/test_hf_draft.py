"""Exits as plain Hugging Face models: the same numbers, the same text, and nothing half written."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from huggingface_hub import metadata_load
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from export import cli, hf_draft
from export.cli import Source, load_model, main
from export.hf_draft import DraftOptions, write_drafts
from export.parity import ParityError
from tests.export.tiny_exits import ALL_HEADS, make_early_exit
from tests.tiny_artifact import VOCAB_SIZE, make_tokenizer
from tests.tiny_models import FAMILIES, make_tiny_model
from train.family import Family
from train.heads import ExitConfig
from train.model import EarlyExitModel

EXITS = (
    ExitConfig(name="first", layer=1, head="native"),
    ExitConfig(name="draft", layer=2, head="layer", vocab_size=32),
)
TWO_LAYERS = {"num_hidden_layers": 2}
DRAFT = (ExitConfig(name="draft", layer=1, head="layer"),)


@pytest.fixture
def source_of(tmp_path: Path) -> Callable[..., Source]:
    """`source_of(family, exits, **config)`: a base's folder and a heads folder in tmp_path."""

    def make(family: str, exits: tuple[ExitConfig, ...] = EXITS, **config: object) -> Source:
        model = make_early_exit(family, exits, **config)
        model.base.save_pretrained(tmp_path / "base")
        model.base.base_name = str(tmp_path / "base")
        model.save_heads(tmp_path / "heads")
        return Source(str(tmp_path / "base"), None, list(exits), tmp_path / "heads")

    return make


def write(source: Source, folder: Path, *dtypes: str, overwrite: bool = False) -> None:
    options = DraftOptions(folder=folder, dtypes=dtypes or ("float32",), overwrite=overwrite)
    write_drafts(lambda dtype: load_model(source, dtype), None, options)


def plain(folder: Path, dtype: torch.dtype | str = "auto") -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def some_ids(num: int = 70) -> Tensor:
    return torch.randint(2, 128, (1, num), generator=torch.Generator().manual_seed(5))


@torch.no_grad()
def exit_logits(model: EarlyExitModel, name: str, ids: Tensor) -> Tensor:
    """Over the whole vocabulary [1, T, V]."""
    return model.unembed(model(ids).exits[name])


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_gives_the_exits_own_logits(family: str, source_of: Callable[..., Source], tmp_path: Path) -> None:
    source = source_of(family)
    write(source, tmp_path / "drafts")
    model, ids = load_model(source, "float32"), some_ids()
    for name, num_layers in (("first", 1), ("draft", 3)):
        draft = plain(tmp_path / "drafts" / name)
        assert draft.config.num_hidden_layers == num_layers
        assert draft.dtype == torch.float32
        assert torch.equal(draft(ids).logits, exit_logits(model, name, ids)), name
    assert len(list((tmp_path / "drafts").iterdir())) == 2


@torch.no_grad()
def test_a_trimmed_exit_proposes_over_the_whole_vocabulary(source_of: Callable[..., Source], tmp_path: Path) -> None:
    source = source_of("llama")
    write(source, tmp_path / "drafts")
    own = load_model(source, "float32").draft_vocabs["draft"]
    logits = plain(tmp_path / "drafts" / "draft")(some_ids()).logits
    assert logits.shape[-1] == 128
    assert not set(logits.argmax(-1).flatten().tolist()) <= set(own.tolist())


@pytest.mark.parametrize("family", ["llama", "qwen3", "opt-350m-shape"])
def test_text_with_an_assistant_is_the_text_without(
    family: str, source_of: Callable[..., Source], tmp_path: Path
) -> None:
    source = source_of(family)
    write(source, tmp_path / "drafts")
    target, calls = plain(tmp_path / "base"), []
    prompt = {"input_ids": some_ids(6), "attention_mask": torch.ones(1, 6, dtype=torch.long)}
    greedy = {"do_sample": False, "max_new_tokens": 24}
    expected = target.generate(**prompt, **greedy)
    for name in ("first", "draft"):
        draft = plain(tmp_path / "drafts" / name)
        draft.register_forward_hook(lambda *_, name=name: calls.append(name))
        assert torch.equal(target.generate(**prompt, **greedy, assistant_model=draft), expected)
    assert set(calls) == {"first", "draft"}


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_half_precision_is_written_beside_full_and_computes_the_same_as_the_exit(
    family: str, source_of: Callable[..., Source], tmp_path: Path
) -> None:
    source = source_of(family)
    write(source, tmp_path / "drafts", "bfloat16", "float32")
    folders = {path.name for path in (tmp_path / "drafts").iterdir()}
    assert folders == {"first-bfloat16", "draft-bfloat16", "first-float32", "draft-float32"}
    draft, model, ids = plain(tmp_path / "drafts" / "draft-bfloat16"), load_model(source, "bfloat16"), some_ids()
    assert draft.dtype == torch.bfloat16
    stored = load_file(tmp_path / "drafts" / "draft-bfloat16" / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
    assert torch.equal(draft(ids).logits, exit_logits(model, "draft", ids))
    full = exit_logits(load_model(source, "float32"), "draft", ids)
    assert torch.equal(plain(tmp_path / "drafts" / "draft-float32")(ids).logits, full)


@pytest.mark.parametrize("family", ["llama", "opt-350m-shape"])
def test_tied_embeddings_stand_once(family: str, source_of: Callable[..., Source], tmp_path: Path) -> None:
    write(source_of(family, tie_word_embeddings=True), tmp_path / "drafts")
    stored = load_file(tmp_path / "drafts" / "draft" / "model.safetensors")
    assert sum(tensor.shape[0] == 128 for tensor in stored.values()) == 1
    draft = plain(tmp_path / "drafts" / "draft")
    assert draft.lm_head.weight is draft.get_input_embeddings().weight


@pytest.mark.parametrize(
    ("family", "config", "layer_types", "max_window_layers"),
    [
        (
            "qwen3",
            {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 3},
            ["full_attention", "full_attention", "sliding_attention"],
            2,
        ),
        (
            "gemma3",
            {"layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]},
            ["sliding_attention", "full_attention", "full_attention"],
            None,
        ),
    ],
)
def test_what_a_config_says_of_each_layer_follows_the_layers(
    family: str, config: dict, layer_types: list[str], max_window_layers: int | None
) -> None:
    base = make_tiny_model(family, num_hidden_layers=4, **config)
    short = Family(base).config_of_layers([0, 1, 3])
    assert (short.num_hidden_layers, short.layer_types) == (3, layer_types)
    assert getattr(short, "max_window_layers", None) == max_window_layers
    assert base.config.num_hidden_layers == len(base.config.layer_types) == 4


def test_the_card_tells_where_the_model_comes_from(source_of: Callable[..., Source], tmp_path: Path) -> None:
    source = source_of("llama", vocab_size=VOCAB_SIZE)
    (tmp_path / "base" / "README.md").write_text("---\nlicense: mit\n---\n\n# A base\n")
    make_tokenizer().save_pretrained(tmp_path / "base")
    assert main(["--checkpoint", str(source.heads), "--hf-draft", str(tmp_path / "drafts")]) == 0
    card = tmp_path / "drafts" / "draft" / "README.md"
    text, known = card.read_text(), metadata_load(card)
    assert known["license"] == "mit" and known["library_name"] == "transformers"
    assert "base_model" not in known  # a folder of this machine is no hub id
    for part in (source.base, "the first 2 of 4 layers", "assistant_model=draft", "32 ids", "% of the positions"):
        assert part in text
    compile(text.split("```python\n")[1].split("```")[0], "card", "exec")
    saved = AutoTokenizer.from_pretrained(card.parent)
    assert saved("the river")["input_ids"] == make_tokenizer()("the river")["input_ids"]


@pytest.mark.parametrize(("mode", "has_drift", "is_there"), [("lora", True, True), ("full", False, False)])
def test_the_card_of_an_exit_over_a_new_reference_names_that_one_as_the_target(
    mode: str,
    has_drift: bool,
    is_there: bool,
    source_of: Callable[..., Source],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = source_of("llama", DRAFT, **TWO_LAYERS)
    old = tmp_path / "old"
    if is_there:
        shutil.copytree(source.base, old)
        (old / "README.md").write_text("---\nlicense: mit\n---\n")
    drift = {"kl": 0.125, "agreement": 0.75, "base_loss": 2.0, "new_loss": 1.5, "num_labels": 99}
    reference = {"mode": mode, "trained_from": {"name": str(old), "revision": None, "config_sha256": "0" * 64},
                 "drift": drift if has_drift else None}  # fmt: skip
    monkeypatch.setattr(cli, "read_source", lambda *_: source._replace(reference=reference))
    monkeypatch.setattr(cli, "load_model", lambda _, dtype: load_model(source, dtype))
    assert main(["--checkpoint", str(source.heads), "--hf-draft", str(tmp_path / "drafts")]) == 0
    text = (tmp_path / "drafts" / "draft" / "README.md").read_text()
    assert 'target = AutoModelForCausalLM.from_pretrained("FOLDER_OF_THE_REFERENCE")' in text
    assert "train merge --checkpoint HEADS --output FOLDER_OF_THE_REFERENCE" in text
    assert f"Its base is not '{old}' but what training with model.backbone={mode} made of it" in text
    assert ("KL(base ‖ new) 0.1250 nats, same token 75.0%" in text) == has_drift
    assert f"Licence of `{old}`: {'mit' if is_there else 'not known here'}" in text
    assert f'from_pretrained("{source.base}"' not in text and f'from_pretrained("{old}"' not in text


def test_both_kinds_of_output_in_one_run(
    source_of: Callable[..., Source], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, asked = source_of("llama", DRAFT, **TWO_LAYERS), []
    # an artifact takes as long as all of this file, and test_cli writes some
    monkeypatch.setattr(
        "export.writer.write_artifact", lambda make_model, tokenizer, options, report: asked.append(options)
    )
    folders = ["--output", str(tmp_path / "artifact"), "--hf-draft", str(tmp_path / "drafts")]
    assert main(["--checkpoint", str(source.heads), "--backend", "eager", "--block-size", "32", *folders]) == 0
    assert [(o.output, o.backends, o.block_size) for o in asked] == [(tmp_path / "artifact", ("eager",), 32)]
    assert plain(tmp_path / "drafts" / "draft").config.num_hidden_layers == 2


@pytest.mark.parametrize(
    ("exits", "message"),
    [
        (ALL_HEADS[1:2], r"exits.draft.head='linear_layer' .*train it with head: layer.*exits.draft.context=3 "),
        (ALL_HEADS[2:], r"exits.intermediate.head='linear' .*train it with head: layer"),
        ((ExitConfig(name="draft", layer=1, head="layer", context=5),), r"exits.draft.context=5 .*context: 0"),
        ((*DRAFT, ExitConfig(name="middle", layer=2, head="linear")), r"exits.middle.head='linear'"),
    ],
)
def test_an_exit_without_such_a_form_is_refused_before_any_work(
    exits: tuple[ExitConfig, ...],
    message: str,
    source_of: Callable[..., Source],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = source_of("llama", exits)
    monkeypatch.setattr("export.cli.load_model", lambda *_: pytest.fail("loaded a model"))
    before = sorted(tmp_path.iterdir())
    with pytest.raises(ValueError, match=message):
        hf_draft.check_forms(exits)
    assert main(["--checkpoint", str(source.heads), "--hf-draft", str(tmp_path / "drafts")]) == 2
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "nothing to write"),
        (["--hf-draft", "{tmp}/drafts", "--backend", "eager"], "--backend is for an artifact"),
        (["--hf-draft", "{tmp}/drafts", "--block-size", "32"], "--block-size is for an artifact"),
        (["--hf-draft", "{tmp}/drafts", "--max-model-len", "64"], "--max-model-len is for an artifact"),
        (["--hf-draft", "{tmp}/a/b", "--output", "{tmp}/a"], "must not lie in each other"),
        (["--hf-draft", "{tmp}/a", "--output", "{tmp}/a", "--overwrite"], "must not lie in each other"),
        (["--hf-draft", "{tmp}/heads"], "add --overwrite"),
        (["--hf-draft", "{tmp}/heads", "--overwrite"], "won't be replaced"),
        (["--hf-draft", "{tmp}/heads/exits.json", "--overwrite"], "is a file"),
    ],
)
def test_a_wrong_option_is_refused(
    options: list[str],
    message: str,
    source_of: Callable[..., Source],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    source = source_of("llama", DRAFT, **TWO_LAYERS)
    before = sorted(tmp_path.rglob("*"))
    assert main(["--checkpoint", str(source.heads), *(o.format(tmp=tmp_path) for o in options)]) == 2
    assert message in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before


def test_overwrite_replaces_what_was_written_before(source_of: Callable[..., Source], tmp_path: Path) -> None:
    source = source_of("llama", DRAFT, **TWO_LAYERS)
    write(source, tmp_path / "drafts", "float32", "bfloat16")
    with pytest.raises(ValueError, match="exists"):
        write(source, tmp_path / "drafts")
    write(source, tmp_path / "drafts", overwrite=True)
    assert [path.name for path in (tmp_path / "drafts").iterdir()] == ["draft"]


@pytest.mark.parametrize(
    "part", ["model.norm.weight", "model.layers.1.mlp.up_proj.weight", "model.embed_tokens.weight"]
)
def test_a_model_that_differs_fails_and_the_old_one_stays(
    part: str, source_of: Callable[..., Source], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = source_of("llama", DRAFT, **TWO_LAYERS)
    write(source, tmp_path / "drafts")
    before = {path: path.read_bytes() for path in (tmp_path / "drafts").rglob("*") if path.is_file()}
    right = hf_draft._state
    monkeypatch.setattr(hf_draft, "_state", lambda *args: (s := right(*args)) | {part: s[part] * 1.001})
    with pytest.raises(ParityError, match="exit draft"):
        write(source, tmp_path / "drafts", overwrite=True)
    with pytest.raises(ParityError, match="exit draft"):
        write(source, tmp_path / "new")
    assert {path: path.read_bytes() for path in (tmp_path / "drafts").rglob("*") if path.is_file()} == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "drafts", "heads"]
