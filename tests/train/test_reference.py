"""The new reference model of a trained base: its folder, its identity, its drift, and what export makes of it."""

import json
import shutil

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from export.cli import load_model, read_source
from export.cli import main as export_main
from export.parity import relative_error
from infer import LLM, SamplingParams
from tests.tiny_engine import Tiny
from tests.train.conftest import save_base
from tests.train.test_backbone import LAYER, LINEAR, NATIVE, ROWS, data, make, trainer  # noqa: F401
from train.base_model import base_fingerprint, load_base
from train.batches import collate
from train.cli import main
from train.drift import measure_drift
from train.family import Family
from train.model import read_heads_record

IDS = torch.tensor([[1, 5, 6, 7, 8, 9, 20, 30]])


def stirred(base_folder, backbone):
    """A module whose base is another one than it was, with a trimmed and an untrimmed exit."""
    module = make(base_folder, backbone=backbone)
    torch.manual_seed(1)
    for parameter in module.model.trainable_backbone():
        torch.nn.init.normal_(parameter, std=0.2) if backbone == "lora" else parameter.data.mul_(1.1)
    module.eval()
    return module


@pytest.fixture(scope="module", params=["lora", "full"])
def saved(request, base_folder, tmp_path_factory):
    """(module, its heads folder)"""
    folder = tmp_path_factory.mktemp(request.param) / "heads"
    module = stirred(base_folder, request.param)
    module.model.save_heads(folder)
    return module, folder


@torch.no_grad()
def states(model):
    outputs = model(IDS, drafted=torch.ones_like(IDS, dtype=torch.bool))
    return {"target": outputs.target, **outputs.exits}


def test_what_export_loads_is_the_model_that_was_trained(saved, base_folder):
    module, folder = saved
    source = read_source(folder, None)
    loaded = load_model(source, "float32")
    for name, expected in states(module.model).items():
        assert relative_error(states(loaded)[name], expected) < 1e-5, name
    plain = states(make(base_folder).model.eval())["target"]
    assert not torch.allclose(states(loaded)["target"], plain, atol=0.1)
    half = load_model(source, "bfloat16")
    assert {p.dtype for p in half.base.parameters()} == {torch.bfloat16}
    assert half.base.model.rotary_emb.inv_freq.dtype == torch.float32
    assert not any("lora" in name for name, _ in loaded.base.named_modules())


def test_the_folder_holds_adapters_or_the_whole_model_in_the_usual_formats(saved, base_folder):
    module, folder = saved
    heads = sum(p.numel() for p in module.model.heads.parameters()) * 4
    total = sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())
    if module.model.mode == "lora":
        adapters = sum(p.numel() for p in module.model.trainable_backbone()) * 4
        assert total < heads + adapters + 60_000  # names and records
        other = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base_folder), folder / "adapter")
    else:
        other = AutoModelForCausalLM.from_pretrained(folder / "base")
        assert (folder / "base" / "tokenizer.json").is_file()
    with torch.no_grad():
        logits = module.model.unembed(states(module.model)["target"])
        torch.testing.assert_close(other.eval()(IDS).logits, logits, atol=1e-4, rtol=1e-5)


def test_heads_meet_no_other_base_than_the_new_reference(saved, base_folder, tmp_path):
    module, folder = saved
    mode = module.model.mode
    record = read_heads_record(folder)
    assert record["backbone"]["is_new_reference"] and record["backbone"]["mode"] == mode
    assert record["backbone"]["trained_from"] == base_fingerprint(load_base(str(base_folder)))
    with pytest.raises(ValueError, match=rf"new reference model \(model\.backbone={mode}, from .*train merge --check"):
        make(base_folder, warm_start=str(folder))
    assert main(["merge", "--checkpoint", str(folder), "--output", str(tmp_path / "merged")]) == 0
    over = make(tmp_path / "merged", warm_start=str(folder))
    assert relative_error(states(over.model)["b"], states(module.model)["b"]) < 1e-5
    with pytest.raises(ValueError, match="whose config differs"):  # nor does the reference meet heads of the base
        make(base_folder).model.save_heads(tmp_path / "old")
        make(tmp_path / "merged", warm_start=str(tmp_path / "old"))


def test_weights_that_are_not_those_of_the_record_are_refused(saved, tmp_path):
    _, folder = saved
    broken = shutil.copytree(folder, tmp_path / "heads")
    (file,) = [f for f in broken.rglob("*.safetensors") if f.parent != broken]
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(ValueError, match=r"not the weights that .*exits\.json was written with"):
        load_model(read_source(broken, None), "float32")


def test_merge_says_when_there_is_nothing_to_merge(base_folder, tmp_path, capsys):
    make(base_folder).model.save_heads(tmp_path / "heads")
    assert "backbone" not in read_heads_record(tmp_path / "heads")
    assert main(["merge", "--checkpoint", str(tmp_path / "heads"), "--output", str(tmp_path / "merged")]) == 2
    assert "its base was frozen" in capsys.readouterr().err


@pytest.mark.parametrize("backbone", ["lora", "full"])
def test_drift_is_what_full_logits_say(base_folder, backbone):
    module = stirred(base_folder, backbone)
    before = Family(load_base(str(base_folder)))
    found = measure_drift(module.model.family, module.model.family if backbone == "lora" else before, ROWS)
    sums = torch.zeros(4)
    for row in ROWS:
        ids, mask, *_ = collate([row])
        laws = []
        for family in (before, module.model.family):
            family.use_attention("eager")
            with torch.no_grad():
                laws.append(family.model(ids).logits[0, :-1][mask[0, 1:]].log_softmax(-1))
        old, new = laws
        labels = ids[0, 1:][mask[0, 1:]].unsqueeze(-1)
        kl, same = (old.exp() * (old - new)).sum(), (old.argmax(-1) == new.argmax(-1)).sum()
        sums += torch.stack([kl, same, -old.gather(1, labels).sum(), -new.gather(1, labels).sum()])
    assert found[:4] == pytest.approx((sums / 6).tolist(), rel=1e-4)
    assert found.num_labels == 6 and found.kl > 0.01


def test_the_engine_gives_the_greedy_tokens_of_hugging_faces_generate(saved, base_folder):
    """Tier programs as modules, over what export loads; the artifact itself is the next test's."""
    _, folder = saved
    model = load_model(read_source(folder, None), "float32")
    plain = load_base(str(base_folder))
    prompts = [[1, 5, 9, 30], [7, 8, 9, 10, 11, 12]]
    requests = Tiny(model, "hispec").generate(prompts, SamplingParams(temperature=0, max_tokens=24))
    wanted, old = ([hf_greedy(base, prompt) for prompt in prompts] for base in (model.base, plain))
    assert [list(r.token_ids) for r in requests] == wanted
    assert wanted != old, "the new reference says what the base says: this test could not fail"


def hf_greedy(base, prompt):
    base.config._attn_implementation = "eager"
    options = {"max_new_tokens": 24, "min_new_tokens": 24, "do_sample": False, "eos_token_id": None}
    return base.generate(torch.tensor([prompt]), **options)[0, len(prompt) :].tolist()


@pytest.mark.slow
@pytest.mark.parametrize("backbone", ["lora", "full"])
def test_a_trained_backbone_is_exported_and_served_as_the_new_reference(base_folder, data, tmp_path, backbone, capsys):  # noqa: F811
    """Greedy tokens are those of Hugging Face's generate over the merged model; all records say that it is new."""
    rates = {"lora": {"lora": {"r": 4, "lr": 0.05}}, "full": {"layerskip": {"lr": 0.01}}}[backbone]
    config = tmp_path / "config.json"
    exits = [LAYER.record() | {"vocab_size": 64}, LINEAR.record()]
    content = {
        "model": {"base": str(base_folder), "exits": exits, "backbone": backbone, **rates, "warmup_steps": 0},
        "data": {"train_files": data.train_files, "val_files": data.val_files, "batch_size": 4},
        "trainer": {
            "accelerator": "cpu", "max_epochs": 3, "logger": False, "enable_progress_bar": False,
            "enable_model_summary": False, "num_sanity_val_steps": 0, "default_root_dir": str(tmp_path / "run"),
        },
    }  # fmt: skip
    config.write_text(json.dumps(content))
    assert main(["fit", "--config", str(config)]) == 0
    assert f"the reference model is a new one (model.backbone={backbone})" in capsys.readouterr().out
    heads, artifact, merged = tmp_path / "run" / "heads", tmp_path / "artifact", tmp_path / "merged"
    drift = read_heads_record(heads)["backbone"]["drift"]
    assert drift["kl"] > 0 and drift["num_labels"] > 0
    command = ["--checkpoint", str(heads), "--output", str(artifact), "--backend", "eager", "--max-model-len", "64"]
    assert export_main(command) == 0
    assert "the reference is a new model, not" in capsys.readouterr().out
    manifest, parity = (json.loads((artifact / name).read_text()) for name in ("hispec.json", "parity.json"))
    assert manifest["provenance"]["reference"] == parity["reference"] == read_heads_record(heads)["backbone"]
    assert manifest["base"]["config_sha256"] == read_heads_record(heads)["base"]["config_sha256"]

    assert main(["merge", "--checkpoint", str(heads), "--output", str(merged)]) == 0
    model, plain = (AutoModelForCausalLM.from_pretrained(folder).eval() for folder in (merged, base_folder))
    llm = LLM(artifact, "hispec")
    prompts = [[1, 5, 9, 30], [7, 8, 9, 10, 11, 12]]
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=24, ignore_eos=True))
    wanted, old = ([hf_greedy(base, prompt) for prompt in prompts] for base in (model, plain))
    assert [list(output.outputs[0].token_ids) for output in outputs] == wanted
    assert wanted != old, "training changed nothing: this test could not fail"


@pytest.mark.parametrize("backbone", ["lora", "full"])
def test_tied_weights_stay_tied_in_the_new_reference(tmp_path, tiny_model, backbone):
    base = save_base(tmp_path / "tied", tiny_model, "llama", tie_word_embeddings=True)
    module = stirred(base, backbone)
    module.model.save_heads(tmp_path / "heads")
    loaded = load_model(read_source(tmp_path / "heads", None), "float32")
    assert loaded.base.lm_head.weight.data_ptr() == loaded.base.model.embed_tokens.weight.data_ptr()
    assert relative_error(states(loaded)["target"], states(module.model)["target"]) < 1e-5
