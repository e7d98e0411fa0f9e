"""The feature cache: training with it and without gives the same weights; what it holds is never something else's."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Trainer
from transformers import LlamaForCausalLM

from train import features
from train.backbone import Lora
from train.base_pass import pass_again
from train.data import DistillationDataModule
from train.heads import ExitConfig
from train.model import EarlyExitModel
from train.module import EarlyExitModule

ROOT = Path(__file__).parents[2]
EXITS = [
    ExitConfig(name="draft", layer=2, head="linear_layer", vocab_size=64, context=2),
    ExitConfig(name="middle", layer=3, head="native"),
    ExitConfig(name="intermediate", layer=4, head="linear"),
]
TRIMMED = [dataclasses.replace(exit_, vocab_size=64) for exit_ in EXITS]  # the target's whole logits are not made


@pytest.fixture
def rows(tmp_path):
    file = tmp_path / "rows.jsonl"
    lines = [{"prompt": f"The {n}", "response": "snow is so slow " + "now " * (n % 5)} for n in range(14)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


@pytest.fixture
def forwards(monkeypatch):
    """The batches that the base itself runs over."""
    seen, plain = [], EarlyExitModel.base_pass

    def noted(self, ids, *rest):
        seen.append(tuple(ids.shape))
        return plain(self, ids, *rest)

    monkeypatch.setattr(EarlyExitModel, "base_pass", noted)
    monkeypatch.setattr("train.checkpoint.promise", lambda *_: None)  # which runs the base after `fit`, too
    return seen


def make_data(base_folder, rows, cache=None, **options):
    own = {"batch_size": 4, "val_fraction": 0.2} | options
    return DistillationDataModule(str(rows), base=str(base_folder), feature_cache=cache and str(cache), **own)


def fit(base_folder, root, data, exits=EXITS, dtype="float32", trained=None, **options):
    torch.manual_seed(0)
    module = EarlyExitModule(str(base_folder), exits, dtype=dtype, lr=1e-3, warmup_steps=0, **(trained or {}))
    silent = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "accelerator": "cpu"}
    run = Trainer(default_root_dir=root, **(silent | {"max_epochs": 3, "num_sanity_val_steps": 0} | options))
    run.fit(module, datamodule=data)
    return module, {k: float(v) for k, v in run.callback_metrics.items()}


@pytest.mark.parametrize(
    "options",
    [{}, {"packing": True, "max_length": 80, "batch_size": 2}, {"num_workers": 2}, {"group_by_length": False}],
)
@pytest.mark.parametrize(
    ("dtype", "precision", "exits"), [("float32", "32-true", EXITS), ("bfloat16", "bf16-mixed", TRIMMED)]
)
def test_training_with_the_cache_gives_the_same_weights(
    base_folder, rows, tmp_path, forwards, options, dtype, precision, exits
):
    run = {"dtype": dtype, "precision": precision, "exits": exits}
    plain, figures = fit(base_folder, tmp_path / "a", make_data(base_folder, rows, **options), **run)
    num_plain = len(forwards)
    forwards.clear()
    data = make_data(base_folder, rows, tmp_path / "cache", **options)
    cached, cached_figures = fit(base_folder, tmp_path / "b", data, **run)
    num_batches = len(data.batches(data.train_rows)) + len(data.batches(data.val_rows))
    assert not data.packing or max(len(sequence) for batch in data.batches(data.train_rows) for sequence in batch) > 1
    assert (num_plain, len(forwards)) == (3 * num_batches, num_batches + 1)  # one token first, for the dtype
    assert cached_figures == figures
    for name, weight in plain.model.heads.state_dict().items():
        assert torch.equal(cached.model.heads.state_dict()[name], weight), name

    forwards.clear()
    again, _ = fit(base_folder, tmp_path / "c", make_data(base_folder, rows, tmp_path / "cache", **options), **run)
    assert forwards == [(1, 1)]
    for name, weight in plain.model.heads.state_dict().items():
        assert torch.equal(again.model.heads.state_dict()[name], weight), name


def test_a_run_with_other_batches_reads_the_same_rows(base_folder, rows, tmp_path, forwards):
    fit(base_folder, tmp_path / "a", make_data(base_folder, rows, tmp_path / "cache"), max_epochs=1)
    options = {"packing": True, "max_length": 512, "batch_size": 1, "val_fraction": 0.4, "seed": 3}
    plain, _ = fit(base_folder, tmp_path / "b", make_data(base_folder, rows, **options))
    forwards.clear()
    cached, _ = fit(base_folder, tmp_path / "c", make_data(base_folder, rows, tmp_path / "cache", **options))
    assert forwards == [(1, 1)]
    for name, weight in plain.model.heads.state_dict().items():
        torch.testing.assert_close(cached.model.heads.state_dict()[name], weight, atol=1e-5, rtol=0)


def test_the_size_is_told_before_anything_is_written(base_folder, rows, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(features.FeatureFiles, "begin", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    data = make_data(base_folder, rows, tmp_path / "cache")
    with caplog.at_level("INFO", logger="lightning.pytorch.utilities.rank_zero"), pytest.raises(BaseException):  # noqa: B017
        fit(base_folder, tmp_path / "a", data)
    size = data.features.num_tokens * (4 * 48 * 4 + 4)
    told = f"{data.features.num_tokens} tokens in all, 4 states × 48 float32 and a number each: {size / 1e9:.2f} GB"
    assert told in caplog.text
    assert not (tmp_path / "cache").exists()
    kept = sum(len(row.token_ids) for row in {tuple(r.token_ids): r for r in data.train_rows + data.val_rows}.values())
    assert data.features.num_tokens == kept


def test_a_disk_without_room_is_refused_before_anything_is_written(base_folder, rows, tmp_path, monkeypatch):
    full = type("Usage", (), {"free": 1000})
    monkeypatch.setattr("train.feature_files.shutil.disk_usage", lambda _: full)
    with pytest.raises(ValueError, match=r"data.feature_cache=.*0.00 GB are needed there, 0.00 GB are free"):
        fit(base_folder, tmp_path / "a", make_data(base_folder, rows, tmp_path / "cache"))
    assert not [path for path in tmp_path.iterdir() if "cache" in path.name]


def test_what_the_states_depend_on_is_known(base_folder, rows, tmp_path):
    """Rows, cut, weights, depths and precision each; another loss or vocabulary does not matter."""
    cache = tmp_path / "cache"
    fit(base_folder, tmp_path / "a", make_data(base_folder, rows, cache), max_epochs=1)
    before = (cache / "states.bin").read_bytes()

    def refused(word, data, **options):
        with pytest.raises(ValueError, match=f"holds the states of something else: .*{word}"):
            fit(base_folder, tmp_path / "b", data, **options)

    refused("rows_sha256", make_data(base_folder, rows, cache, max_length=24))
    refused("depths", make_data(base_folder, rows, cache), exits=[ExitConfig(name="draft", layer=1, head="linear")])
    refused("dtype", make_data(base_folder, rows, cache), dtype="bfloat16", precision="bf16-mixed")
    refused("precision", make_data(base_folder, rows, cache), precision="bf16-mixed")
    assert (cache / "states.bin").read_bytes() == before
    others = [ExitConfig(name=n, layer=k, head="linear", vocab_size=32) for n, k in (("a", 2), ("b", 3), ("c", 4))]
    fit(base_folder, tmp_path / "c", make_data(base_folder, rows, cache), exits=others, max_epochs=1)

    text = rows.read_text()
    rows.write_text(text.replace("slow", "snow", 1))
    refused("rows_sha256", make_data(base_folder, rows, cache))


def test_other_weights_under_the_same_name_are_refused(tmp_path, rows, tiny_model):
    from tests.train.conftest import save_base

    base = save_base(tmp_path / "base", tiny_model, "llama")
    fit(base, tmp_path / "a", make_data(base, rows, tmp_path / "cache"), max_epochs=1)
    model = LlamaForCausalLM.from_pretrained(base)
    with torch.no_grad():
        model.model.layers[5].mlp.down_proj.weight[0, 0] += 1e-3
    model.save_pretrained(base)
    with pytest.raises(ValueError, match="weights_sha256"):
        fit(base, tmp_path / "b", make_data(base, rows, tmp_path / "cache"))


@pytest.mark.parametrize("backbone", ["lora", "full"])
def test_a_base_that_is_trained_is_refused(base_folder, rows, tmp_path, backbone):
    trained = {"backbone": backbone} | ({"lora": Lora(r=2, target_modules=["q_proj"])} if backbone == "lora" else {})
    exits = [ExitConfig(name="draft", layer=2, head="native")]
    with pytest.raises(ValueError, match=f"feature_cache.* does not go with model.backbone={backbone}"):
        fit(base_folder, tmp_path / "a", make_data(base_folder, rows, tmp_path / "cache"), exits, trained=trained)
    assert not (tmp_path / "cache").exists()


def test_a_folder_that_holds_something_else_stays_as_it_is(base_folder, rows, tmp_path):
    other, empty = tmp_path / "other", tmp_path / "empty"
    other.mkdir()
    empty.mkdir()
    (other / "thesis.txt").write_text("years of work")
    with pytest.raises(ValueError, match="is no feature cache"):
        fit(base_folder, tmp_path / "a", make_data(base_folder, rows, other))
    assert [path.name for path in other.iterdir()] == ["thesis.txt"]
    fit(base_folder, tmp_path / "a", make_data(base_folder, rows, empty), max_epochs=1)
    assert sorted(path.name for path in empty.iterdir()) == ["manifest.json", "states.bin"]


def test_states_that_are_cut_short_are_refused(base_folder, rows, tmp_path):
    cache = tmp_path / "cache"
    fit(base_folder, tmp_path / "a", make_data(base_folder, rows, cache), max_epochs=1)
    os.truncate(cache / "states.bin", (cache / "states.bin").stat().st_size - 1)
    with pytest.raises(ValueError, match=r"states.bin has .* bytes instead of"):
        fit(base_folder, tmp_path / "b", make_data(base_folder, rows, cache))


KILLED = """
import os, signal, sys
from train.feature_files import FeatureFiles
from tests.train.test_features import *

plain, written = FeatureFiles.write, []
def write(self, row, *states):
    if len(written) == 6:
        os.kill(os.getpid(), signal.SIGKILL)
    written.append(plain(self, row, *states))

FeatureFiles.write = write
fit(sys.argv[1], sys.argv[2] + "/a", make_data(sys.argv[1], sys.argv[3], sys.argv[2] + "/cache"))
"""


def test_a_writer_that_was_killed_goes_on_where_it_stopped(base_folder, rows, tmp_path, forwards):
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(script), str(base_folder), str(tmp_path), str(rows)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == -9, done.stderr
    assert not (tmp_path / "cache").exists()
    was_done = (tmp_path / ".cache.unfinished" / "done").read_bytes()
    assert was_done.count(1) == 6

    data = make_data(base_folder, rows, tmp_path / "cache")
    fit(base_folder, tmp_path / "b", data, max_epochs=1)
    batches = [*data.batches(data.train_rows), *data.batches(data.val_rows)]
    written = [all(was_done[data.features.number(row)] for (row,) in batch) for batch in batches]
    assert len(forwards) == 1 + written.count(False) < 1 + len(batches)  # a token first, for the dtype
    fit(base_folder, tmp_path / "c", make_data(base_folder, rows, tmp_path / "whole"), max_epochs=1)
    assert (tmp_path / "cache/states.bin").read_bytes() == (tmp_path / "whole/states.bin").read_bytes()
    assert not (tmp_path / ".cache.unfinished").exists()


def test_what_another_run_left_unfinished_is_replaced(base_folder, rows, tmp_path):
    cache, unfinished = tmp_path / "cache", tmp_path / ".cache.unfinished"
    fit(base_folder, tmp_path / "a", make_data(base_folder, rows, cache, max_length=24), max_epochs=1)
    states = (cache / "states.bin").read_bytes()
    (cache / "done").write_bytes(b"\1" * 14)
    cache.rename(unfinished)
    fit(base_folder, tmp_path / "b", make_data(base_folder, rows, cache), max_epochs=1)
    fit(base_folder, tmp_path / "c", make_data(base_folder, rows, tmp_path / "whole"), max_epochs=1)
    assert (cache / "states.bin").read_bytes() == (tmp_path / "whole/states.bin").read_bytes() != states


def test_two_writers_of_one_folder_are_refused(base_folder, rows, tmp_path):
    data = make_data(base_folder, rows, tmp_path / "cache")
    data.setup("fit")
    one, two = (features.FeatureFiles(tmp_path / "cache", data.train_rows) for _ in range(2))
    origin = features.origin_of(EarlyExitModule(str(base_folder), EXITS).model, "32-true")
    one.begin(origin)
    with pytest.raises(ValueError, match="another process is writing it"):
        two.begin(origin)


def test_validation_alone_neither_reads_nor_writes_it(base_folder, rows, tmp_path, forwards):
    data = make_data(base_folder, rows, tmp_path / "cache")
    module, _ = fit(base_folder, tmp_path / "a", data, max_epochs=1)
    forwards.clear()
    Trainer(default_root_dir=tmp_path, logger=False, enable_progress_bar=False, accelerator="cpu").validate(
        module, data, verbose=False
    )
    assert len(forwards) == len(data.batches(data.val_rows))


def test_a_pass_of_kept_states_is_the_base_pass(base_folder):
    model = EarlyExitModule(str(base_folder), EXITS).model
    ids, positions = torch.randint(3, 300, (2, 9)), torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4, 5], list(range(9))])
    passed = model.base_pass(ids, positions)
    again = pass_again(model.family, torch.stack([*passed.below, passed.last]), ids, positions)
    assert torch.equal(again.attention["visible"], passed.attention["visible"])
    for own, kept in zip([*passed.below, passed.last], [*again.below, again.last], strict=True):
        assert torch.equal(own, kept)
