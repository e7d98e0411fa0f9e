"""The estimate against tensors that really stand: heads, checkpoints, and the most that a step holds at once."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.train.published_configs import published_config
from train.backbone import Lora
from train.cli import main
from train.estimate import PROCESS, Workload, estimate, workload
from train.heads import ExitConfig
from train.layerskip import LayerSkip
from train.model import EarlyExitModel

EXITS = (ExitConfig(name="draft", layer=2, vocab_size=64), ExitConfig(name="intermediate", layer=4, vocab_size=64))
WORK = Workload(exits=EXITS, batch_size=4, max_length=128)
FAMILIES = ("llama", "llama-head-dim", "mistral", "qwen2", "qwen3", "opt", "opt-350m-shape", "gemma3")


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_those_of_the_real_model(family, tiny_model):
    base = tiny_model(family)
    found = estimate(base.config, WORK)
    heads = EarlyExitModel(base, EXITS).trainable_parameters()
    assert found.base == 4 * sum(p.numel() for p in base.parameters())
    assert found.heads == 12 * sum(p.numel() for p in heads)
    assert found.disk == 28 * sum(p.numel() for p in heads)
    assert found.memory == found.base + found.heads + found.step + PROCESS
    assert found.checkpoint == found.heads  # weights and two moments


def test_the_config_is_left_as_it_is(tiny_model):
    config = tiny_model("gemma3").config
    before = config.to_json_string()
    estimate(config, WORK)
    assert config.to_json_string() == before


def test_half_precision_halves_the_base_and_leaves_the_heads(tiny_model):
    config = tiny_model("llama").config
    whole = estimate(config, WORK)
    half = estimate(config, replace(WORK, dtype="bfloat16", precision="bf16-mixed"))
    assert (2 * half.base, half.heads, half.disk) == (whole.base, whole.heads, whole.disk)
    assert half.step < whole.step
    assert estimate(config, replace(WORK, precision="bf16-true")).heads == whole.heads // 2
    with pytest.raises(ValueError, match="dtype='int8' is unknown"):
        estimate(config, replace(WORK, dtype="int8"))


def test_a_step_grows_with_the_batch_but_not_with_the_depth(tiny_model):
    config = tiny_model("llama").config
    small, large = (estimate(config, replace(WORK, batch_size=n)).step for n in (16, 32))
    assert 1.6 < large / small < 2.1
    deep = tiny_model("llama", num_hidden_layers=12).config
    assert estimate(deep, WORK).step == estimate(config, WORK).step


def test_packing_accumulation_and_ranks_cost_what_they_add(tiny_model):
    config = tiny_model("llama").config
    plain = estimate(config, WORK)
    gradients = plain.heads // 3
    assert estimate(config, replace(WORK, packing=True)).step - plain.step >= 4 * 128 * 128
    assert 0 < estimate(config, replace(WORK, accumulates=True)).step - plain.step <= gradients
    assert estimate(config, replace(WORK, num_ranks=2)).step - plain.step == gradients


def test_native_exits_need_no_optimizer_and_no_disk(tiny_model):
    config = tiny_model("llama").config
    native = estimate(config, replace(WORK, exits=[ExitConfig(name="draft", layer=2, head="native")]))
    assert (native.heads, native.disk) == (0, 0) and native.step > 0


def test_a_trained_base_adds_its_moments_its_states_and_its_backward_pass(tiny_model):
    base = tiny_model("llama")
    frozen = estimate(base.config, WORK)
    weights = sum(p.numel() for p in base.parameters())
    layers = sum(p.numel() for p in base.model.layers.parameters() if p.ndim > 1)
    lora = estimate(base.config, replace(WORK, backbone="lora", lora=Lora(r=2, target_modules=["q_proj"])))
    adapters = 6 * 2 * (48 + 48)
    assert (lora.base, lora.heads - frozen.heads, lora.disk - frozen.disk) == (
        frozen.base,
        12 * adapters,
        28 * adapters,
    )
    full = estimate(base.config, replace(WORK, backbone="full", layerskip=LayerSkip(rotation=3)))
    assert full.checkpoint - frozen.checkpoint == 12 * weights
    assert (full.base, full.heads - frozen.heads, full.disk - frozen.disk) == (frozen.base, 8 * weights, 28 * weights)
    assert full.step > lora.step > frozen.step
    attention = 6 * 2 * WORK.max_length * 4 * 12
    unembedding = 2 * 128 * 48
    assert lora.flops - frozen.flops == 2 * layers + attention + 3 * unembedding + 4 * adapters
    assert full.flops - frozen.flops == 4 * layers + 2 * attention + 3 * 4 * unembedding  # three depths a step
    deep = tiny_model("llama", num_hidden_layers=12).config
    assert (
        estimate(deep, replace(WORK, backbone="lora")).step > estimate(base.config, replace(WORK, backbone="lora")).step
    )


def test_shards_divide_layers_and_heads_but_for_what_runs(tiny_model):
    base = tiny_model("llama")
    alone, four = (estimate(base.config, replace(WORK, num_ranks=n, sharded=n > 1)) for n in (1, 4))
    layer = 4 * sum(p.numel() for p in base.model.layers[0].parameters())
    running = layer + 4 * 48  # a head: a layer and its norm
    assert four.base == alone.base - 6 * layer * 3 // 4 + running
    assert (four.heads, four.disk, four.step) == (alone.heads // 4, alone.disk, alone.step)


def test_arithmetic_is_two_a_weight_forward_and_six_where_it_is_trained():
    """Llama-2-7B by hand: 6.74e9 weights less the embedding, two layers of 0.2e9, attention to half of 1,024 keys."""
    exits = [ExitConfig(name=n, layer=layer, vocab_size=8192) for n, layer in (("a", 4), ("b", 11))]
    found = estimate(published_config("meta-llama/Llama-2-7b-chat-hf"), replace(WORK, exits=exits, max_length=1024))
    layer, attention = 4 * 4096**2 + 3 * 4096 * 11008, 2 * 1024 * 4096
    expected = 32 * (2 * layer + attention) + 2 * 32000 * 4096 + 2 * (6 * layer + 3 * attention + 4 * 8192 * 4096)
    assert found.flops == pytest.approx(expected, rel=1e-3)
    assert found.base == 2 * 2 * 6738415616  # float32; the published number of parameters
    assert f"{expected * 1e6 / 50e12 / 60:.2g} min per million tokens at 50 TFLOP/s" in found.line(50)
    on_cpu = f"peak memory {(found.memory + found.checkpoint) / 1e9:.1f} GB (base 27.0"
    assert on_cpu in found.line(50, on_cpu=True) and on_cpu not in found.line(50)


def test_a_step_holds_as_much_as_is_estimated(tmp_path):
    """In a process of its own: the peak resident size that steps of a small model add, on the CPU."""
    program = tmp_path / "step.py"
    program.write_text(PROGRAM)
    limits = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}  # freed memory goes back at once
    environment = {
        "PATH": "/usr/bin:/bin",
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "OMP_NUM_THREADS": "1",
        **limits,
    }
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    measured, estimated = json.loads(done.stdout.splitlines()[-1])
    assert measured == pytest.approx(estimated, rel=0.1)


PROGRAM = """
import json, threading, torch
from transformers import LlamaConfig, LlamaForCausalLM
from train.estimate import Workload, estimate, _loss
from train.heads import ExitConfig
from train.model import EarlyExitModel

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

def watch():
    while True:
        seen.append(resident())
        stop.wait(0.001)

config = LlamaConfig(vocab_size=8192, hidden_size=256, intermediate_size=1024, num_hidden_layers=6,
                     num_attention_heads=4, num_key_value_heads=2)
exits = [ExitConfig(name="a", layer=2, vocab_size=1024), ExitConfig(name="b", layer=4, vocab_size=1024)]
work = Workload(exits=exits, batch_size=8, max_length=256)
model = EarlyExitModel(LlamaForCausalLM(config).eval().requires_grad_(False), exits)
for e in exits:
    model.draft_vocabs[e.name] = torch.arange(1024)
ids = torch.zeros(8, 256, dtype=torch.int64)
_loss(model, ids[:1, :64], None).backward()  # kernels and libraries are there
model.zero_grad()
seen, stop = [resident()], threading.Event()
threading.Thread(target=watch, daemon=True).start()
_loss(model, ids, None).backward()
print(json.dumps([max(seen) - seen[0], estimate(config, work).step]))
"""


def test_the_command_reads_the_config_and_no_weights(tmp_path, capsys):
    base = tmp_path / "llama2-7b"
    published_config("meta-llama/Llama-2-7b-chat-hf").save_pretrained(base)
    flags = ["--config", "configs/llama2-7b.yaml", "--model.base", str(base)]
    assert main(["estimate", *flags]) == 0
    line = capsys.readouterr().out.strip()
    assert line.startswith("estimate: peak memory 22.5 GB (base 13.5, ") and line.endswith("at 50 TFLOP/s")
    assert main(["estimate", *flags, "--tflops", "100", "--data.batch_size", "32", "--trainer.devices", "2"]) == 0
    other = capsys.readouterr().out.strip()
    assert other.endswith("at 100 TFLOP/s") and "base 13.5, heads 4.86" in other and "peak memory 22.5" not in other
    for wrong, named in (("0", "--tflops 0"), ("fast", "fast")):
        assert main(["estimate", *flags, "--tflops", wrong]) == 2
        assert named in capsys.readouterr().err
    assert main(["estimate", *flags, "--model.exits", '[{"name": "draft", "layer": 32}]']) == 2
    assert "exits.draft.layer=32 must lie between 1 and 31" in capsys.readouterr().err
    assert main(["estimate", "--config", "configs/llama2-7b.yaml", "--model.base", str(tmp_path / "no/such/base")]) == 2
    assert "no config.json there" in capsys.readouterr().err


@pytest.mark.parametrize(("devices", "ranks"), [("auto", 2), (3, 6), ("3", 6), ([0, 1], 4), ("-1", 2)])
def test_processes_are_counted_where_the_config_says_how_many(devices, ranks):
    trainer = {"devices": devices, "num_nodes": 2, "precision": None, "accumulate_grad_batches": 4, "strategy": "ddp"}
    data = {"batch_size": 1, "max_length": 2, "packing": True}
    exits = [{"name": "draft", "layer": 2, "head": "layer", "vocab_size": None, "loss": {"tv": 1.0}}]
    model = {"exits": exits, "dtype": "float32", "backbone": "lora", "lora": {"r": 3}, "layerskip": None}
    work = workload({"model": model, "data": data, "trainer": trainer})
    assert (work.backbone, work.lora) == ("lora", Lora(r=3))
    assert (work.num_ranks, work.accumulates, work.packing, work.precision) == (ranks, True, True, "None")
    assert work.exits[0].training_loss.tv == 1.0
