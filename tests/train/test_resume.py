"""A run that is killed in the middle of an epoch, and of a step, ends with the weights of one that was not."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from torch.utils.data import DistributedSampler

from tests.train.conftest import save_base
from train.cli import main
from train.resume import ResumableLoader

ROOT = Path(__file__).parents[2]
KILLED = """
import os, signal, sys
from train.cli import main
from train.module import EarlyExitModule

def kill(self, *_):
    if self.trainer.fit_loop.epoch_loop.total_batch_idx + 1 == int(sys.argv[1]):
        os.kill(os.getpid(), signal.SIGTERM)

EarlyExitModule.on_train_batch_end = kill
sys.exit(main(sys.argv[2:]))
"""


@pytest.fixture(scope="module")
def dropping_base(tmp_path_factory, tiny_model):
    """An OPT whose layers drop out, so that heads depend on the random state."""
    folder = tmp_path_factory.mktemp("base") / "opt"
    return save_base(folder, tiny_model, "opt", template=None, dropout=0.1, attention_dropout=0.0)


@pytest.fixture(scope="module")
def flags(dropping_base, tmp_path_factory):
    """6 batches an epoch, 2 of them a step, 2 epochs."""
    folder = tmp_path_factory.mktemp("run")
    rows = folder / "rows.jsonl"
    texts = [{"prompt": f"The {n} ", "response": "snow is so slow " + "now " * n} for n in range(12)]
    rows.write_text("".join(json.dumps(row) + "\n" for row in texts))
    exits = [{"name": "draft", "layer": 2, "head": "layer"}, {"name": "intermediate", "layer": 4, "head": "linear"}]
    content = {
        "model": {"base": str(dropping_base), "exits": exits, "lr": 0.01, "warmup_steps": 2},
        "data": {"train_files": str(rows), "val_files": str(rows), "batch_size": 2},
        "trainer": {
            "accelerator": "cpu",
            "max_epochs": 2,
            "accumulate_grad_batches": 2,
            "logger": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
        },
    }
    config = folder / "config.yaml"
    config.write_text(yaml.safe_dump(content))
    return ["fit", "--config", str(config), "--trainer.default_root_dir"]


def checkpoint(folder: Path):
    return torch.load(folder / "last.ckpt", weights_only=True)


@pytest.fixture(scope="module")
def uninterrupted(flags, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    assert main([*flags, str(folder)]) == 0
    return checkpoint(folder)


def test_an_epoch_begins_where_the_loop_stands_and_every_epoch_has_its_own_order():
    order = DistributedSampler(range(6), num_replicas=1, rank=0, seed=3)
    place = 0
    loader = ResumableLoader(range(6), batch_size=None, sampler=order, position=lambda: place)
    begun_early = iter(loader)  # as Lightning does, before it has told epoch and place
    first = list(loader)
    place = 4
    assert list(loader) == list(begun_early) == first[4:]
    order.set_epoch(1)
    place = 0
    second = list(loader)
    assert sorted(second) == sorted(first) == list(range(6)) and second != first


@pytest.mark.parametrize("killed_after", [3, 8])  # within the first epoch and a step; within the second, between steps
def test_a_killed_run_that_resumes_ends_with_the_same_weights(flags, uninterrupted, tmp_path, killed_after):
    stopped = tmp_path / "stopped"
    command = [sys.executable, "-c", KILLED, str(killed_after), *flags, str(stopped)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 128 + signal.SIGTERM, done.stderr
    assert f"--ckpt_path {stopped}/interrupted.ckpt" in done.stdout + done.stderr
    assert main([*flags, str(stopped), "--ckpt_path", str(stopped / "interrupted.ckpt")]) == 0
    expected, resumed = uninterrupted, checkpoint(stopped)
    assert resumed["global_step"] == expected["global_step"] == 6
    for name, weight in expected["state_dict"].items():
        torch.testing.assert_close(resumed["state_dict"][name], weight, atol=1e-6, rtol=0)
    assert resumed["lr_schedulers"][0]["last_epoch"] == expected["lr_schedulers"][0]["last_epoch"]
    assert not (stopped / "interrupted.ckpt").exists(), "a run that ends well needs it no more"
