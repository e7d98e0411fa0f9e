"""A tiny artifact with a tokenizer and a chat template, for tests of what users touch; built by the real export."""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from export.writer import ExportOptions, write_artifact
from infer import LLM
from tests.tiny_engine import DEVICE
from tests.tiny_models import make_tiny_model
from train.heads import ExitConfig
from train.model import EarlyExitModel

VOCAB_SIZE = 300
MAX_MODEL_LEN = 64
ON_DEVICE = ["--device", str(DEVICE)]  # for command lines
TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TEXT = ["Hello, world! A small text about rivers, stones and the sea; and the people by the river."] * 5


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE over VOCAB_SIZE ids, <eos> is id 0."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, special_tokens=["<eos>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", clean_up_tokenization_spaces=False)
    fast.chat_template = TEMPLATE
    return fast


def make_artifact(folder: Path, backends: tuple[str, ...] = ("eager",)) -> Path:
    """An artifact at `folder`: llama, 6 layers, a trimmed `layer` exit at 2 and a native one at 4, EOS id 0."""
    shutil.copytree(_built(backends), folder)
    return folder


@functools.cache
def _built(backends: tuple[str, ...]) -> Path:
    """Export takes as long as a file of tests: once per process is enough."""
    scratch = tempfile.mkdtemp(prefix="hispec-tiny-artifact-")
    atexit.register(shutil.rmtree, scratch, ignore_errors=True)

    def make_model(dtype: str) -> EarlyExitModel:
        base = make_tiny_model("llama", vocab_size=VOCAB_SIZE, eos_token_id=0, pad_token_id=0).to(getattr(torch, dtype))
        base.generation_config.eos_token_id = 0
        exits = [
            ExitConfig(name="draft", layer=2, head="layer", vocab_size=200),
            ExitConfig(name="intermediate", layer=4, head="native"),
        ]
        model = EarlyExitModel(base, exits, {"draft": torch.arange(200)})
        return model.eval().requires_grad_(False)

    options = ExportOptions(
        output=Path(scratch) / "artifact",
        backends=backends,
        max_model_len=MAX_MODEL_LEN,
        block_size=4,
        prefill_chunk=16,
        device=str(DEVICE),
    )
    return write_artifact(make_model, make_tokenizer(), options)


def load(artifact: Path, strategy: str = "auto", **options: object) -> LLM:
    """The artifact on the device that pytest was given."""
    return LLM(artifact, strategy, **({"device": str(DEVICE)} | options))
