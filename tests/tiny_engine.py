"""Engines over tiny models for tests: the tiers' modules run in eager, without an artifact.

`rig` replaces the lower exits' logits by a script, so that a test chooses which drafts are right.
"""

from __future__ import annotations

import functools
import itertools
import os
import random
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from export.programs import make_programs, tier_spans
from infer.blocks import BlockPool
from infer.cuda_graphs import Capture, with_graphs
from infer.detokenizer import Detokenizer
from infer.engine import Engine
from infer.grammar import GrammarCompiler
from infer.logprobs import ScoreLog
from infer.manifest import BaseInfo, ExitInfo, Limits, Manifest, ProgramInfo, TierInfo
from infer.params import SamplingParams
from infer.prefix_cache import PrefixCache
from infer.processors import Rules
from infer.request import Request
from infer.round_maker import make_round
from infer.row import Row
from infer.runner import Runner
from infer.sprinter import Classifier
from infer.strategy import LOSSY, Policy, rule_of, stages_of
from infer.strategy import STRATEGIES as ALL_STRATEGIES
from tests.tiny_models import make_tiny_model
from train.heads import ExitConfig
from train.model import EarlyExitModel

DEVICE = torch.device(os.environ.get("HISPEC_TEST_DEVICE", "cpu"))  # pytest --device
BLOCK_SIZE = 4
STRATEGIES = tuple(name for name in ALL_STRATEGIES if name not in LOSSY)
IN_PLACE = tuple(name for name in STRATEGIES if name != "lookahead")  # need no blocks but those of their text
# Lengths on, before and behind the edges of blocks of 4 and chunks of 8; the last ids repeat, as prompts do.
PROMPTS = (
    (5, 9, 3),
    (7, 8, 9, 10, 11, 12, 13, 14, 15),
    (3,) * 17,
    (1,),
    (20, 21, 22, 23),
    (5, 9) * 4,
    (2, 90, 31, 64, 8),
    tuple(range(40, 56)),
)

NAN_ID = 100  # see `nan_model`

# (row, tier, position of the token to be picked, logits [V']) → logits [V']
Rig = Callable[[Row, int, int, Tensor], Tensor]


class IdText:
    """A tokenizer stand-in: id 5 is the text '<5>', of which all but the number may be left out."""

    def __call__(self, text: str, *, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": [int(number) for number in re.findall(r"\d+", text)]}

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        return "".join(f"<{i}>" for i in token_ids)


def make_model(family: str = "llama", exits: Sequence[ExitConfig] | None = None, **config: object) -> EarlyExitModel:
    base = make_tiny_model(family, **config)
    torch.manual_seed(1)
    chosen = exits or (
        ExitConfig(name="draft", layer=2, head="layer"),
        ExitConfig(name="intermediate", layer=4, head="native"),
    )
    return EarlyExitModel(base, list(chosen)).eval().place(DEVICE)


def make_trimmed_model(vocab: Tensor) -> EarlyExitModel:
    """Both exits know the ids `vocab` [V'] alone."""
    model = make_model(
        exits=[
            ExitConfig(name="draft", layer=2, head="layer", vocab_size=len(vocab)),
            ExitConfig(name="intermediate", layer=4, head="linear", vocab_size=len(vocab)),
        ]
    )
    model.set_draft_vocab("draft", vocab)
    model.set_draft_vocab("intermediate", vocab)
    return model


def make_manifest(model: EarlyExitModel, prefill_chunk: int = 8, max_model_len: int = 128) -> Manifest:
    family = model.family
    exits = [
        ExitInfo(
            name=e.name,
            layer=e.layer,
            head=e.head,
            vocab_size=e.vocab_size,
            has_kv=e.has_layer,
            context=e.context,
        )
        for e in [*model.exits, ExitConfig(name="target", layer=family.num_layers, head="native")]
    ]
    return Manifest(
        base=BaseInfo(
            name="tiny", revision=None, config_sha256="0" * 64, family=family.name, num_layers=family.num_layers,
            hidden_size=family.hidden_size, exit_size=family.exit_size, vocab_size=family.vocab_size,
            num_kv_heads=family.num_kv_heads, head_dim=family.head_dim,
        ),
        tiers=[TierInfo(name=s.name, start=s.start, stop=s.stop, exit=s.name) for s in tier_spans(model)],
        exits=exits,
        dtypes=["float32"],
        block_size=BLOCK_SIZE,
        limits=Limits(max_model_len=max_model_len, prefill_chunk=prefill_chunk, max_query_len=32, max_batch=16),
        eos_token_ids=model.eos_token_ids,
        provenance={},
    )  # fmt: skip


class Tiny:
    """An engine with as little around it as possible; `generate` is the whole interface."""

    def __init__(
        self,
        model: EarlyExitModel,
        strategy: str,
        policy: Policy | None = None,
        num_blocks: int = 256,
        max_num_seqs: int = 8,
        bitwise_range: tuple[int, int] | None = None,
        rig: Rig | None = None,
        max_model_len: int = 128,
        max_num_prefill_tokens: int = 512,
        enable_prefix_caching: bool = False,
        verification: str = "identity",
        capture: Capture | None = None,
        bitwise: bool = True,
        tokenizer: Any = None,
        classifier: Classifier | None = None,
    ) -> None:
        self.manifest = make_manifest(model, max_model_len=max_model_len)
        programs = make_programs(model, BLOCK_SIZE)
        infos = {
            p.name: ProgramInfo(file=p.name, kv_layers=list(p.kv_layers), bitwise_range=bitwise_range, num_kernels={})
            for p in programs
        }
        runner_type = Runner if rig is None else _rigged(rig)
        runs = {p.name: p.module for p in programs}
        if capture is not None:
            runs = with_graphs(runs, infos, self.manifest, max_num_seqs, capture)
        self.runner = runner_type(
            self.manifest, runs, infos, model.draft_vocabs,
            num_blocks=num_blocks, max_num_seqs=max_num_seqs, dtype=model.base.dtype, device=DEVICE,
            bitwise=bitwise,
        )  # fmt: skip
        stages = stages_of(strategy, policy or Policy(), self.manifest, classifier)
        self.round = make_round(self.runner, stages, rule_of(verification, stages, self.manifest))
        pool = BlockPool(num_blocks, BLOCK_SIZE)
        self.prefix_cache = PrefixCache(pool, self.runner.prefill_chunk) if enable_prefix_caching else None
        self.engine = Engine(self.runner, self.round, pool, max_num_seqs, max_num_prefill_tokens, self.prefix_cache)
        self._names = tuple(self.manifest.tiers[s.tier].name for s in stages)
        self._tokenizer = tokenizer or IdText()
        self._numbers = itertools.count()
        self._seeds = random.Random(0)

    def request(self, prompt: Sequence[int], params: SamplingParams, eos: Sequence[int] = ()) -> Request:
        longest = self.manifest.limits.max_model_len
        limit = longest if params.max_tokens is None else min(longest, len(prompt) + params.max_tokens)
        eos_ids = frozenset(() if params.ignore_eos else eos)
        seed = self._seeds.getrandbits(63) if params.seed is None else params.seed
        wanted, vocab_size = params.structured_outputs, self.manifest.base.vocab_size
        grammar = None if wanted is None else GrammarCompiler(self._tokenizer, vocab_size, eos).compile(wanted)
        request = Request(
            request_id=str(next(self._numbers)), prompt=None, prompt_token_ids=tuple(prompt), params=params,
            seed=seed, max_len=limit, stop_token_ids=eos_ids | frozenset(params.stop_token_ids or ()),
            eos_token_ids=eos_ids, detokenizer=Detokenizer(self._tokenizer, params), judge_names=self._names,
            rules=Rules.of(params, len(prompt), eos, self._tokenizer, grammar),
            scores=ScoreLog.of(params.logprobs, params.prompt_logprobs),
        )  # fmt: skip
        for _ in range(1, params.n):
            request.add_choice(Detokenizer(self._tokenizer, params))
        return request

    def drain(self) -> None:
        """Step until all is done; a request that is never admitted fails the test instead of hanging it."""
        for _ in range(1000):
            if not self.engine.has_unfinished:
                return
            self.engine.step()
            self.engine.check_integrity()
        raise AssertionError(f"still unfinished: {[*self.engine.waiting, *self.engine.running]}")

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams],
        eos: Sequence[int] = (),
    ) -> list[Request]:
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        requests = [self.request(p, q, eos) for p, q in zip(prompts, each, strict=True)]
        for request in requests:
            self.engine.add(request)
        self.drain()
        assert self.prefix_cache or self.engine.pool.num_free == self.engine.pool.num_blocks - 1
        return requests


def stub_programs(tiny: Tiny) -> None:
    """Replace all programs by ones that compute nothing: what is left is the runtime's own time."""
    manifest, runner = tiny.manifest, tiny.runner
    hidden: dict[tuple[int, ...], Tensor] = {}
    logits = torch.zeros(512, manifest.base.vocab_size, device=DEVICE)

    def paged(x: Tensor, positions: Tensor, *_: object) -> Tensor:
        shape = (*positions.shape, manifest.base.hidden_size)
        if shape not in hidden:
            hidden[shape] = torch.zeros(shape, device=DEVICE)
        return hidden[shape]

    runner._trunks = [(paged, *rest) for _, *rest in runner._trunks]
    runner._exits = [
        (paged if e.has_kv else lambda states: states, *rest)
        for (_, *rest), e in zip(runner._exits, runner.exits, strict=True)
    ]
    runner._unembeds = [(lambda states: logits[: len(states)], *rest) for _, *rest in runner._unembeds]


def hf_logits(model: EarlyExitModel, ids: Sequence[int]) -> Tensor:
    """[T, V]: Hugging Face's own forward, without any cache."""
    base = model.base
    saved = base.config._attn_implementation  # shared with the programs, which would otherwise attend in another way
    base.config._attn_implementation = "eager"
    with torch.no_grad():
        logits = base(torch.tensor([list(ids)], device=DEVICE), use_cache=False).logits[0]
    base.config._attn_implementation = saved
    return logits


def hf_greedy(model: EarlyExitModel, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """The oracle: Hugging Face's own forward, one token at a time."""
    ids = list(prompt)
    for _ in range(num_tokens):
        ids.append(int(hf_logits(model, ids)[-1].argmax()))
    return ids[len(prompt) :]


@functools.cache
def model_of(family: str = "llama") -> EarlyExitModel:
    """The family's two-exit model, made once; nobody changes it."""
    return make_model(family)


@functools.cache
def oracle(family: str, prompt: tuple[int, ...], num_tokens: int) -> list[int]:
    return hf_greedy(model_of(family), prompt, num_tokens)


def all_is_free(tiny: Tiny) -> bool:
    tiny.engine.check_integrity()
    while tiny.prefix_cache and (idle := tiny.prefix_cache.pop_idle()):
        tiny.engine.kv.give_back(idle)
    rings = sorted(tiny.engine._free_rings)
    return tiny.engine.pool.num_free == tiny.engine.pool.num_blocks - 1 and rings == list(range(1, len(rings) + 1))


def nan_model() -> tuple[EarlyExitModel, dict[tuple[int, ...], list[int]]]:
    """The embedding of NAN_ID is NaN, so a prompt that holds it fills its pages with NaN; nobody ever proposes it."""
    model = make_model()
    with torch.no_grad():
        model.base.lm_head.weight[NAN_ID] = 0
        texts = {p: [*p, *hf_greedy(model, p, 14)] for p in ((5, 9, 3), (11,) * 17, (NAN_ID, 3, 4))}
        model.base.model.embed_tokens.weight[NAN_ID] = torch.nan
    return model, texts


class Script:
    """A rig that knows the right tokens and gives them where `is_right` says so.

    Args:
        texts: prompt → prompt and all tokens after it that the target would give.
        is_right: (number of the prompt, tier, tokens since the last committed one, number of the round) → whether the
            exit picks the target's token. Otherwise it picks another one: `wrong[tier]` ids further.
    """

    def __init__(
        self,
        texts: dict[tuple[int, ...], list[int]],
        is_right: Callable[[int, int, int, int], bool],
        wrong: Sequence[int] = (1, 2, 3),
        height: float = 10.0,
    ) -> None:
        self._height = height  # of the chosen token's logit over the others
        self._texts, self._is_right, self._wrong = texts, is_right, wrong
        self._rounds: dict[int, list[int]] = {}  # id of a row → where its rounds began

    def __call__(self, row: Row, tier: int, position: int, logits: Tensor) -> Tensor:
        prompt = tuple(row.token_ids[: row.num_prompt_tokens])
        text, rounds = self._texts[prompt], self._rounds.setdefault(id(row), [])
        if row.num_committed not in rounds:
            rounds.append(row.num_committed)
        offset, number = position - row.num_committed, rounds.index(row.num_committed)
        token = text[position] if position < len(text) else 0
        if not self._is_right(list(self._texts).index(prompt), tier, offset, number):
            token = (token + self._wrong[tier]) % len(logits)
        return torch.zeros_like(logits).index_fill_(0, torch.tensor([token], device=logits.device), self._height)


def texts_of(family: str, prompts: Sequence[tuple[int, ...]], num_tokens: int) -> dict[tuple[int, ...], list[int]]:
    return {p: [*p, *oracle(family, p, num_tokens)] for p in prompts}


def _rigged(rig: Rig) -> type[Runner]:
    class RiggedRunner(Runner):
        def advance(self, rows, tier):  # type: ignore[no-untyped-def]
            starts = [row.cursors[tier] for row in rows]
            self.cells = [(r, p) for r, start in zip(rows, starts, strict=True) for p in range(start + 1, len(r) + 1)]
            states = super().advance(rows, tier)
            numbers = torch.arange(len(states), device=states.device).unsqueeze(1)
            return torch.cat([states, numbers.to(states.dtype)], dim=1)  # so that each is known again

        def logits(self, tier, states):  # type: ignore[no-untyped-def]
            if states.shape[1] == self._unembeds[tier][3].width:  # a prompt's
                return super().logits(tier, states)
            logits = super().logits(tier, states[:, :-1].contiguous())
            if tier == self.num_tiers - 1 and not getattr(rig, "rigs_target", False):
                return logits
            cells = [self.cells[int(number)] for number in states[:, -1]]
            return torch.stack([rig(row, tier, p, line) for (row, p), line in zip(cells, logits, strict=True)])

        def score_branches(self, branches):  # type: ignore[no-untyped-def]
            scores, target = super().score_branches(branches), self.num_tiers - 1
            ends = [(b, b.start + len(b.token_ids) + 1) for b in branches]
            cells = [(b.row, p) for b, end in ends for p in range(end - b.num_scored, end)]
            if not getattr(rig, "rigs_target", False):
                return scores
            rigged = [rig(row, target, p, line) for (row, p), line in zip(cells, scores.logits, strict=True)]
            return scores._replace(logits=torch.stack(rigged))

    return RiggedRunner
