"""A base that comes quantised is taken as the numbers that it stands for, or refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiny_models import make_tiny_model
from train import quantized_base
from train.base_model import base_fingerprint, config_sha256, load_base, load_config
from train.quantized_base import MARK

INT8 = {"default": {"_type": "Int8WeightOnlyConfig", "_data": {}, "_version": 2}}
PROMPT = torch.tensor([[5, 9, 3, 77, 20]])


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    make_tiny_model("llama").save_pretrained(tmp_path / "plain")
    return tmp_path / "plain"


def say(folder: Path, **record: Any) -> str:
    """The folder, whose config now tells of a quantisation."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": record}))
    return str(folder)


@pytest.mark.parametrize("load", [load_base, load_config])
@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"quant_method": "gptq", "bits": 4}, ["quant_method='gptq'", "model.dequantize()"]),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, ["quant_method='bitsandbytes'"]),
        ({"load_in_4bit": True}, ["quant_method='None'"]),
        ({"quant_method": "torchao", "quant_type": {"default": {"_type": "Int8DynamicActivationInt8WeightConfig"}}},
         ["Int8DynamicActivationInt8WeightConfig", "only Int8WeightOnlyConfig"]),
        ({"quant_method": "torchao", "quant_type": INT8 | {"lm_head": {"_type": "Int4WeightOnlyConfig"}}},
         ["Int4WeightOnlyConfig"]),
        ({"quant_method": "torchao", "quant_type": "int8_weight_only"}, ["int8_weight_only"]),
    ],
)  # fmt: skip
def test_other_quantisation_is_refused_by_name(
    plain: Path, load: Any, record: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(ValueError) as error:
        load(say(plain, **record))
    for word in words:
        assert word in str(error.value)


def test_without_torchao_its_bases_are_refused_with_the_remedy(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized_base.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install torchao"):
        load_base(say(plain, quant_method="torchao", quant_type=INT8))


def test_a_plain_base_is_not_marked(plain: Path) -> None:
    assert not hasattr(load_base(str(plain)).config, MARK)
    assert not hasattr(load_config(str(plain)), MARK)


@pytest.fixture
def quantized(plain: Path, tmp_path: Path) -> Path:
    """The tiny model as a user would have quantised it."""
    quantization = pytest.importorskip("torchao.quantization")
    from transformers import AutoModelForCausalLM, TorchAoConfig

    config = TorchAoConfig(quantization.Int8WeightOnlyConfig())
    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32, quantization_config=config)
    model.save_pretrained(tmp_path / "quantized")
    return tmp_path / "quantized"


def test_the_numbers_are_the_quantised_models_own(quantized: Path, plain: Path) -> None:
    from transformers import AutoModelForCausalLM

    own, ours = AutoModelForCausalLM.from_pretrained(quantized, dtype=torch.float32), load_base(str(quantized))
    assert {type(p) for p in ours.parameters()} == {torch.nn.Parameter}
    torch.testing.assert_close(ours(PROMPT).logits, own(PROMPT).logits, rtol=0, atol=1e-4)
    difference = (load_base(str(plain))(PROMPT).logits - own(PROMPT).logits).abs().max()
    assert difference > 1e-2, "else the plain base would pass as well"


def test_it_is_a_reference_of_its_own_and_saves_as_plain_numbers(quantized: Path, plain: Path, tmp_path: Path) -> None:
    model = load_base(str(quantized))
    fingerprint = base_fingerprint(model)["config_sha256"]
    assert fingerprint == config_sha256(load_config(str(quantized)))
    assert fingerprint != base_fingerprint(load_base(str(plain)))["config_sha256"]
    model.save_pretrained(tmp_path / "again")
    again = load_base(str(tmp_path / "again"))
    assert base_fingerprint(again)["config_sha256"] == fingerprint
    assert torch.equal(again(PROMPT).logits, model(PROMPT).logits)


def test_its_artifact_serves_the_quantised_models_own_tokens(quantized: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    from export.writer import ExportOptions, write_artifact
    from infer import LLM, SamplingParams
    from train.heads import ExitConfig
    from train.model import EarlyExitModel

    def make_model(dtype: str) -> EarlyExitModel:
        exits = [ExitConfig(name="draft", layer=2, head="native")]
        return EarlyExitModel(load_base(str(quantized), dtype=dtype), exits).eval().requires_grad_(False)

    options = ExportOptions(output=tmp_path / "artifact", backends=("eager",), max_model_len=64, block_size=4)
    write_artifact(make_model, None, options)
    own = AutoModelForCausalLM.from_pretrained(quantized, dtype=torch.float32)
    expected = own.generate(PROMPT, max_new_tokens=24, do_sample=False)[0, PROMPT.shape[1] :].tolist()
    llm = LLM(tmp_path / "artifact", "layerskip")
    params = SamplingParams(temperature=0, max_tokens=24)
    (output,) = llm.generate({"prompt_token_ids": PROMPT[0].tolist()}, params)
    assert list(output.outputs[0].token_ids) == expected
