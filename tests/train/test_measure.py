"""`python -m train measure`: validation and the engine of a real export count the same on one text, or it says so."""

import json

import pytest
import torch
import yaml

from export.writer import ExportOptions, write_artifact
from tests.tiny_artifact import VOCAB_SIZE, make_tokenizer
from tests.tiny_engine import DEVICE
from tests.tiny_models import make_tiny_model
from train.base_model import load_base
from train.cli import main
from train.heads import ExitConfig
from train.model import EarlyExitModel

EXIT = {"name": "draft", "layer": 2, "head": "linear_layer", "context": 3}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A base whose upper layers add little, exits that are no copies of it, and their artifact: all in one folder."""
    folder = tmp_path_factory.mktemp("measure")
    base = make_tiny_model("llama", vocab_size=VOCAB_SIZE, eos_token_id=0, pad_token_id=0)
    with torch.no_grad():
        for layer in base.model.layers[2:]:
            layer.self_attn.o_proj.weight.mul_(0.3)
            layer.mlp.down_proj.weight.mul_(0.3)
    base.save_pretrained(folder / "base")
    make_tokenizer().save_pretrained(folder / "base")
    model = EarlyExitModel(load_base(str(folder / "base"), dtype="float32"), [ExitConfig(**EXIT)])
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.heads.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.mul_(0.3)
            parameter.add_(0.01 * torch.randn(parameter.shape, generator=generator))
    model.save_heads(folder / "heads")
    with torch.no_grad():
        for parameter in model.heads.parameters():
            parameter.mul_(-1)
    model.save_heads(folder / "others")

    def make_model(dtype):
        own = EarlyExitModel(load_base(str(folder / "base"), dtype=dtype), [ExitConfig(**EXIT)])
        own.load_heads(folder / "heads")
        return own.eval()

    made = ExportOptions(
        output=folder / "artifact", max_model_len=64, block_size=4, prefill_chunk=16, device=str(DEVICE)
    )
    write_artifact(make_model, make_tokenizer(), made)
    return folder


@pytest.fixture
def measure(trained, tmp_path):
    def run(*flags, artifact=trained / "artifact", heads=trained / "heads", exits=(EXIT,)):
        texts = [[(7 * n + k * k) % 250 + 5 for k in range(12)] for n in range(8)]
        rows = [{"token_ids": ids, "loss_mask": [0] * 6 + [1] * 6} for ids in texts]
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        content = {
            "model": {"base": str(trained / "base"), "exits": list(exits), "num_draft_tokens": 3},
            "data": {"train_files": str(path), "val_files": str(path)},
            "trainer": {"accelerator": "cpu", "logger": False, "default_root_dir": str(tmp_path / "run")},
        }
        if heads is not None:
            content["model"]["warm_start"] = str(heads)
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(content))
        return main(["measure", "--config", str(tmp_path / "config.yaml"), "--artifact", str(artifact), *flags])

    return run


def test_validation_and_engine_agree(measure, capsys):
    assert measure("--max_new_tokens", "40", "--num_prompts", "6", "--tolerance", "1.5") == 0
    out = capsys.readouterr().out
    validated, served = ([float(w.rstrip("%")) for w in _row(out, name)] for name in ("validation", "engine"))
    assert len(served) == 4 and 5 < served[0] < 95, "a test of nothing"
    assert served == pytest.approx(validated, abs=1.5)


def _row(out: str, name: str) -> list[str]:
    (line,) = [line for line in out.splitlines() if f"│ {name} " in line]
    return line.replace("│", " ").split()[1:]


def test_exits_that_are_not_the_artifacts_are_told_by_their_acceptance(measure, trained, capsys):
    assert measure("--max_new_tokens", "40", heads=trained / "others") == 1
    assert "allowed 3" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "flags", "words"),
    [
        ({"heads": None}, [], ["model.warm_start is not set"]),
        ({"exits": [{**EXIT, "layer": 3}], "heads": None}, [], ["warm_start"]),
        ({}, ["--tolerance", "0"], ["--tolerance=0", "greater than 0"]),
        ({}, ["--num_prompts", "0"], ["--num_prompts=0"]),
        ({}, ["--max_new_tokens", "1"], ["--max_new_tokens=1", "at least 2"]),
        ({}, ["--max_new_tokens", "64"], ["--max_new_tokens=64", "lower it"]),
    ],
)
def test_a_mistake_is_one_line_that_names_it(measure, capsys, changes, flags, words):
    assert measure(*flags, **changes) == 2
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert line.startswith("error: ") and all(word in line for word in words), line


def test_an_artifact_of_other_exits_or_another_folder_is_refused(measure, trained, tmp_path, capsys):
    assert measure(artifact=tmp_path) == 2
    assert "no hispec.json there" in capsys.readouterr().err
    folder = tmp_path / "heads"
    model = EarlyExitModel(load_base(str(trained / "base"), dtype="float32"), [ExitConfig(**(EXIT | {"context": 2}))])
    model.save_heads(folder)
    assert measure(heads=folder, exits=[EXIT | {"context": 2}]) == 2
    assert "('draft', 2, 'linear_layer', None, 3)" in capsys.readouterr().err
