"""A tiny base as a folder, with a byte-level tokenizer and a stock chat template (no generation block)."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, PreTrainedTokenizerFast

TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
END = 2  # <|im_end|>: EOS, and padding too


def make_tokenizer(template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    special = ["<unk>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(["The snow is so slow now, user and assistant know the answer"] * 20, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<|im_start|>", eos_token="<|im_end|>", pad_token="<|im_end|>"
    )
    tokenizer.chat_template = template
    return tokenizer


def save_base(folder: Path, tiny_model, family: str, template: str | None = TEMPLATE, **config) -> Path:
    model = tiny_model(family, vocab_size=320, bos_token_id=1, eos_token_id=END, pad_token_id=END, **config)
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=END, pad_token_id=END)
    model.save_pretrained(folder)
    make_tokenizer(template).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer()


@pytest.fixture(scope="session")
def base_folder(tmp_path_factory, tiny_model) -> Path:
    return save_base(tmp_path_factory.mktemp("base") / "llama", tiny_model, "llama")


@pytest.fixture(scope="session")
def plain_folder(tmp_path_factory, tiny_model) -> Path:
    """An OPT without chat template."""
    return save_base(tmp_path_factory.mktemp("base") / "opt", tiny_model, "opt", template=None)
