"""FSDP2 (ModelParallelStrategy) on two CPU processes with gloo: the heads of one process, from shards of the base."""

import json
import math
import subprocess
import sys

import pytest
import torch
import yaml
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy

from tests.train.test_ddp import ENV, ROOT
from train.cli import main
from train.model import read_heads_record
from train.sharding import asks_for_shards

STRATEGY = {
    "class_path": "lightning.pytorch.strategies.ModelParallelStrategy",
    "init_args": {"data_parallel_size": 2, "tensor_parallel_size": 1, "save_distributed_checkpoint": False},
}
# Tells how much of the base's layers this process holds
WATCHED = """
import sys
from train.cli import main
from train.module import EarlyExitModule

def tell(self):
    layers = self.model.family.decoder.layers
    local, all_ = (sum(f(p).numel() for p in layers.parameters()) for f in (lambda p: p.to_local(), lambda p: p))
    print(f"rank {self.global_rank} holds {local / all_:.2f}", file=sys.stderr)

EarlyExitModule.on_train_end = tell
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture
def config(base_folder, tmp_path):
    """Heads of every kind, one with a context, one that trains nothing, over rows of unlike length."""
    rows = tmp_path / "rows.jsonl"
    texts = [{"prompt": f"The {n}", "response": "now " * (1 + 7 * n)} for n in range(4)]
    rows.write_text("".join(json.dumps(row) + "\n" for row in texts))
    exits = [
        {"name": "a", "layer": 1, "head": "native"},
        {"name": "b", "layer": 2, "head": "linear_layer"},
        {"name": "c", "layer": 4, "head": "linear", "vocab_size": 64},
        {"name": "d", "layer": 5, "head": "layer", "context": 2},
    ]
    silent = {"gradient_clip_val": 1.0, "logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return {
        "model": {"base": str(base_folder), "exits": exits, "lr": 1.0e-3, "warmup_steps": 0},
        "data": {"train_files": str(rows), "val_files": str(rows), "batch_size": 4},
        "trainer": {
            "accelerator": "cpu",
            "max_epochs": 2,
            "num_sanity_val_steps": 0,
            **silent,
        },
    }


def fit(config, folder, script=None, code=0, **options):
    """In a process of its own where there is a script."""
    content = config | {"trainer": config["trainer"] | {"default_root_dir": str(folder / "run"), **options}}
    folder.mkdir(exist_ok=True)
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(content))
    if script is None:
        assert main(["fit", "--config", str(file)]) == code
        return ""
    (folder / "script.py").write_text(script)
    command = [sys.executable, str(folder / "script.py"), "fit", "--config", str(file)]
    done = subprocess.run(command, cwd=ROOT, env=ENV, capture_output=True, text=True, timeout=300)
    assert done.returncode == code, done.stderr
    return done.stderr


@pytest.mark.slow
def test_two_processes_with_shards_equal_one(config, tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    fit(config, one)
    halves = config | {"data": config["data"] | {"batch_size": 2}}
    told = fit(halves, two, WATCHED, devices=2, strategy=STRATEGY)
    assert "rank 0 holds 0.50" in told and "rank 1 holds 0.50" in told
    alone, both = (torch.load(folder / "run" / "last.ckpt", weights_only=True) for folder in (one, two))
    assert alone["global_step"] == both["global_step"] == 2
    assert set(alone["state_dict"]) == set(both["state_dict"])
    for name, weight in alone["state_dict"].items():
        assert name.startswith("model.heads.")
        if name.startswith("model.heads.d."):  # the windows of its contexts are drawn anew in every process
            assert weight.isfinite().all()
            continue
        torch.testing.assert_close(both["state_dict"][name], weight, atol=1e-5, rtol=0)
    assert [e["name"] for e in read_heads_record(two / "run" / "heads")["exits"]] == ["a", "b", "c", "d"]
    cached = halves | {"data": halves["data"] | {"feature_cache": str(tmp_path / "cache")}}
    fit(cached, tmp_path / "three", WATCHED, devices=2, strategy=STRATEGY)
    again = torch.load(tmp_path / "three" / "run" / "last.ckpt", weights_only=True)["state_dict"]
    for name, weight in both["state_dict"].items():
        assert torch.equal(again[name], weight), name
    # what the sharded run leaves is what one process goes on from, and measures
    flags = ["--config", str(one / "config.yaml")]
    assert main(["validate", *flags, "--model.warm_start", str(two / "run" / "heads")]) == 0
    assert main(["validate", *flags, "--ckpt_path", str(two / "run" / "last.ckpt")]) == 0


class Mesh:
    """Stands in for a device mesh."""

    def __init__(self, **sizes):
        self.sizes = sizes

    def __getitem__(self, name):
        return Mesh(**{name: self.sizes[name]})

    def size(self):
        return math.prod(self.sizes.values())


@pytest.mark.parametrize(
    ("tensor", "distributed", "backbone", "reason"),
    [
        (2, False, "frozen", r"tensor_parallel_size=2 is not supported: set it to 1, and data_parallel_size to 4"),
        (1, True, "frozen", r"save_distributed_checkpoint=true .* set it to false"),
        (1, False, "lora", r"model\.backbone=lora with ModelParallelStrategy.*trainer\.strategy=ddp"),
    ],
)
def test_what_shards_do_not_go_with_is_refused(tensor, distributed, backbone, reason):
    strategy = ModelParallelStrategy(save_distributed_checkpoint=distributed)
    strategy._device_mesh = Mesh(data_parallel=2, tensor_parallel=tensor)
    with pytest.raises(ValueError, match=reason):
        asks_for_shards(strategy, backbone)


def test_only_fsdp2_shards():
    assert not asks_for_shards(DDPStrategy(), "lora")
    strategy = ModelParallelStrategy(save_distributed_checkpoint=False)
    strategy._device_mesh = Mesh(data_parallel=2, tensor_parallel=1)
    assert asks_for_shards(strategy, "frozen")
    with pytest.raises(ValueError, match=r"trainer\.strategy=fsdp .*ModelParallelStrategy"):
        asks_for_shards(FSDPStrategy(), "frozen")
