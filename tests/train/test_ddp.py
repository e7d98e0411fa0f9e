"""Two processes (gloo, CPU) train the same heads as one with the doubled batch; every head gets its gradient (B16)."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from train.cli import main
from train.model import read_heads_record

ROOT = Path(__file__).parents[2]
ENV = os.environ | {"PYTHONPATH": str(ROOT)}  # for a script that lies elsewhere
KILLED = """
import os, signal, sys
from train.cli import main
from train.module import EarlyExitModule

def kill(self, *_):
    if self.trainer.global_rank == 1 and self.trainer.fit_loop.epoch_loop.total_batch_idx == 2:
        os.kill(os.getpid(), signal.SIGTERM)

EarlyExitModule.on_train_batch_end = kill
sys.exit(main(sys.argv[1:]))
"""
CACHED = """
import sys
from train import checkpoint
from train.cli import main
from train.module import EarlyExitModule

checkpoint.promise = lambda *_: None  # counts after `fit`, beside the cache
plain = EarlyExitModule._base_pass
def from_cache(self, batch, *rest):
    assert batch.kept is not None
    return plain(self, batch, *rest)

EarlyExitModule._base_pass = from_cache
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture
def flags(base_folder, tmp_path):
    """Four rows with 3 to 24 labels; among the exits one that trains nothing, and one whose labels it can't say."""
    rows = tmp_path / "rows.jsonl"
    texts = [{"prompt": f"The {n}", "response": "now " * (1 + 7 * n)} for n in range(4)]
    rows.write_text("".join(json.dumps(row) + "\n" for row in texts))
    exits = [
        {"name": "a", "layer": 1, "head": "native"},
        {"name": "b", "layer": 2, "head": "layer", "loss": {"kl": 1.0, "tv": 0.5}},
        {"name": "c", "layer": 4, "head": "linear", "vocab_size": 2, "loss": {"ce": 1.0}},
    ]
    content = {
        "model": {"base": str(base_folder), "exits": exits, "lr": 1.0e-3, "warmup_steps": 0},
        "data": {"train_files": str(rows), "val_files": str(rows)},
        "trainer": {
            "accelerator": "cpu",
            "max_epochs": 3,
            "logger": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "num_sanity_val_steps": 0,
        },
    }
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(content))
    return ["fit", "--config", str(config)]


def options(folder, devices, batch_size):
    root = ["--trainer.default_root_dir", str(folder), "--data.batch_size", str(batch_size)]
    return [*root, "--trainer.devices", str(devices), "--trainer.strategy", "ddp" if devices > 1 else "auto"]


def run(command, code=0):
    done = subprocess.run([sys.executable, *command], cwd=ROOT, env=ENV, capture_output=True, text=True, timeout=300)
    assert done.returncode == code, done.stderr


def test_two_processes_equal_one_with_the_doubled_batch(flags, tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    run(["-m", "train", *flags, *options(two, 2, 2)])
    assert main([*flags, *options(one, 1, 4)]) == 0
    alone, both = (torch.load(folder / "last.ckpt", weights_only=True) for folder in (one, two))
    assert alone["global_step"] == both["global_step"] == 3
    for name, weight in alone["state_dict"].items():
        assert name.startswith("model.heads.")
        torch.testing.assert_close(both["state_dict"][name], weight, atol=1e-5, rtol=0)
    moments = [run["optimizer_states"][0]["state"] for run in (alone, both)]
    for parameter in moments[0]:  # unlike AdamW's weights, its moments know the gradient's scale
        for name in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(moments[1][parameter][name], moments[0][parameter][name], atol=1e-6, rtol=1e-4)
    assert [e["name"] for e in read_heads_record(two / "heads")["exits"]] == ["a", "b", "c"]


@pytest.mark.slow
def test_two_processes_write_and_read_one_feature_cache(flags, tmp_path):
    plain, cached, script = tmp_path / "plain", tmp_path / "cached", tmp_path / "cached.py"
    script.write_text(CACHED)
    run(["-m", "train", *flags, *options(plain, 2, 2)])
    run([str(script), *flags, *options(cached, 2, 2), "--data.feature_cache", str(tmp_path / "cache")])
    assert sorted(path.name for path in (tmp_path / "cache").iterdir()) == ["manifest.json", "states.bin"]
    expected, found = (torch.load(folder / "last.ckpt", weights_only=True)["state_dict"] for folder in (plain, cached))
    for name, weight in expected.items():
        assert torch.equal(found[name], weight), name


@pytest.mark.slow
@pytest.mark.parametrize("backbone", ["lora", "full"])
def test_two_processes_train_the_same_base_as_one(flags, tmp_path, backbone):
    """Without layer dropout, which every process draws for its own rows."""
    file = Path(flags[-1])
    content = yaml.safe_load(file.read_text())
    content["model"] |= {"backbone": backbone, "layerskip": None if backbone == "lora" else {"max_dropout": 0.0}}
    file.write_text(yaml.safe_dump(content))
    one, two = tmp_path / "one", tmp_path / "two"
    run(["-m", "train", *flags, *options(two, 2, 2)])
    assert main([*flags, *options(one, 1, 4)]) == 0
    alone, both = (torch.load(folder / "last.ckpt", weights_only=True) for folder in (one, two))
    assert sum(name.startswith("model.backbone.") for name in alone["state_dict"]) > 50
    moments = [run["optimizer_states"][0]["state"] for run in (alone, both)]
    for parameter in moments[0]:  # AdamW's weights would follow the sign of a gradient that is only rounding
        torch.testing.assert_close(
            moments[1][parameter]["exp_avg"], moments[0][parameter]["exp_avg"], atol=1e-5, rtol=1e-3
        )


@pytest.mark.slow
def test_sigterm_to_any_rank_stops_all_of_them_and_the_run_goes_on(flags, tmp_path):
    whole, stopped, script = tmp_path / "whole", tmp_path / "stopped", tmp_path / "killed.py"
    script.write_text(KILLED)  # in the second epoch, between its two batches
    run([str(script), *flags, *options(stopped, 2, 1)], code=128 + signal.SIGTERM)
    run(["-m", "train", *flags, *options(stopped, 2, 1), "--ckpt_path", str(stopped / "interrupted.ckpt")])
    run(["-m", "train", *flags, *options(whole, 2, 1)])
    resumed, expected = (torch.load(folder / "last.ckpt", weights_only=True) for folder in (stopped, whole))
    assert resumed["global_step"] == expected["global_step"] == 6
    for name, weight in expected["state_dict"].items():
        torch.testing.assert_close(resumed["state_dict"][name], weight, atol=1e-6, rtol=0)
