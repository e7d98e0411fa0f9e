"""The oracle for what rows ask of their logits: Hugging Face's forward, one token at a time, each rule written plainly.

The models' logits lie close together, as penalties of at most 2 must be able to change what is picked.
"""

import functools
import math

import torch

from infer.noise import gumbel
from infer.params import SamplingParams
from infer.strategy import Policy
from tests.tiny_engine import PROMPTS, IdText, hf_logits, make_model, make_trimmed_model
from train.heads import ExitConfig

NUM_TOKENS = 14
ROWS = PROMPTS[:4]
EOS = (126, 127)


@functools.cache
def soft_model():
    """Logits lie close together, as penalties of at most 2 must be able to change what is picked."""
    return soften(make_model())


def soften(model):
    with torch.no_grad():
        model.base.lm_head.weight.mul_(0.1)
    return model


def processed(logits: torch.Tensor, prompt: list[int], output: list[int], params: SamplingParams) -> torch.Tensor:
    out = logits.clone()  # [V] float32
    for i in range(len(out)):
        if params.allowed_token_ids is not None and i not in params.allowed_token_ids:
            out[i] = -math.inf
    for word in params.bad_words:
        ids = IdText()(word)["input_ids"]
        if [*output, ids[-1]][-len(ids) :] == ids:
            out[ids[-1]] = -math.inf
    if len(output) < params.min_tokens:
        for i in {*EOS, *params.stop_token_ids}:
            out[i] = -math.inf
    for i, bias in (params.logit_bias or {}).items():
        out[i] += bias
    for i in {*prompt, *output}:
        factor = params.repetition_penalty
        out[i] = out[i] / factor if out[i] > 0 else out[i] * factor
    for i in set(output):
        out[i] -= params.frequency_penalty * output.count(i)
        out[i] -= params.presence_penalty
    return out


def picked(logits: torch.Tensor, params: SamplingParams, position: int) -> int:
    if params.is_greedy:
        return int(logits.argmax())
    scaled = logits.double() / params.temperature
    law = scaled.softmax(dim=0)
    kept = law >= params.min_p * law.max() * (1 - 1e-12)
    if params.top_k > 0:
        kept &= scaled >= scaled[kept].sort(descending=True).values[: params.top_k][-1]
    if params.top_p < 1:
        law = scaled.masked_fill(~kept, -math.inf).softmax(dim=0)
        order = law.argsort(descending=True)
        size = int((law[order].cumsum(dim=0) < params.top_p).sum()) + 1
        kept &= law >= law[order[min(size, len(order)) - 1]]
    key = [torch.tensor([x], device=logits.device) for x in (params.seed, 0, position)]
    noise = gumbel(*key, torch.arange(len(logits), device=logits.device))[0]
    return int((scaled + noise).masked_fill(~kept, -math.inf).argmax())


@functools.cache
def next_logits(text: tuple[int, ...]) -> torch.Tensor:
    return hf_logits(soft_model(), text)[-1]


def oracle(prompt: tuple[int, ...], params: SamplingParams) -> list[int]:
    """What plain decoding must give; nothing of ours but the noise takes part."""
    output: list[int] = []
    ends = {*EOS, *params.stop_token_ids}
    while len(output) < params.max_tokens and not (output and output[-1] in ends):
        logits = processed(next_logits((*prompt, *output)), list(prompt), output, params)
        output.append(picked(logits, params, len(prompt) + len(output)))
    return output


def greedy(**fields: object) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": NUM_TOKENS, **fields})


def sampled(seed: int = 3, **fields: object) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.0, "seed": seed, "max_tokens": NUM_TOKENS, **fields})


@functools.cache
def plain_text(row: int) -> list[int]:
    return oracle(ROWS[row], greedy())


def a_bad_word(num_tokens: int) -> str:
    """A piece out of the middle of the first row's plain text."""
    return " ".join(str(i) for i in plain_text(0)[4 : 4 + num_tokens])


def setting(name: str) -> SamplingParams:
    """Parameters that change what at least one row gives: see the test of that name."""
    text = plain_text(0)
    return {
        "presence": lambda: greedy(presence_penalty=2.0),
        "presence below 0": lambda: greedy(presence_penalty=-2.0),
        "frequency": lambda: greedy(frequency_penalty=2.0),
        "frequency below 0": lambda: greedy(frequency_penalty=-2.0),
        "repetition": lambda: greedy(repetition_penalty=1.8),
        "repetition below 1": lambda: greedy(repetition_penalty=0.5),
        "bias": lambda: greedy(logit_bias={text[3]: -100, 77: 1.5, 78: 0.5}),
        "allowed": lambda: greedy(allowed_token_ids=list(range(0, 120, 5))),
        "bad word": lambda: greedy(bad_words=[a_bad_word(1)]),
        "bad words": lambda: greedy(bad_words=[a_bad_word(3), a_bad_word(2), "1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16"]),
        "min_tokens": lambda: greedy(min_tokens=6, stop_token_ids=[text[1], text[3]]),
        "min_p": lambda: sampled(temperature=0.15, min_p=0.4),
        "min_p with the others": lambda: sampled(temperature=0.15, min_p=0.4, top_k=12, top_p=0.9),
        "sampled penalties": lambda: sampled(
            temperature=0.3, presence_penalty=1.0, frequency_penalty=0.5, repetition_penalty=1.3
        ),
        "all at once": lambda: sampled(
            temperature=0.2, min_p=0.05, top_k=40, top_p=0.95, presence_penalty=-1.0, frequency_penalty=0.7,
            repetition_penalty=1.2, logit_bias={9: 3.0, 13: -4.0}, allowed_token_ids=list(range(2, 90)),
            bad_words=[a_bad_word(1), "9 9"], min_tokens=5, stop_token_ids=[9, 13],
        ),
    }[name]()  # fmt: skip


SETTINGS = (
    "presence", "presence below 0", "frequency", "frequency below 0", "repetition", "repetition below 1", "bias",
    "allowed", "bad word", "bad words", "min_tokens", "min_p", "min_p with the others", "sampled penalties",
    "all at once",
)  # fmt: skip


@functools.cache
def wanted(name: str) -> list[list[int]]:
    return [oracle(p, setting(name)) for p in ROWS]


def ids_of(requests: list) -> list[list[int]]:
    return [r.token_ids for r in requests]


def policy_of(numbers: tuple[int, int, int]) -> Policy:
    return Policy(num_draft_tokens=numbers[0], window=numbers[1], inner_rounds=numbers[2])


# ---- models ----


def twin_model(vocab: torch.Tensor | None = None):
    """Layers from the third on add nothing, so every exit has the target's own logits."""
    size = None if vocab is None else len(vocab)
    model = make_model(exits=[
        ExitConfig(name="draft", layer=2, head="native", vocab_size=size),
        ExitConfig(name="intermediate", layer=4, head="native"),
    ])  # fmt: skip
    with torch.no_grad():
        for layer in model.base.model.layers[2:]:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    if vocab is not None:
        model.set_draft_vocab("draft", vocab)
    return soften(model)


@functools.cache
def trimmed_model():
    return soften(make_trimmed_model(torch.arange(1, 128, 3)))
