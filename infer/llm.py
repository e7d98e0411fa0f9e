"""`LLM`: an artifact, ready to generate. Turns prompts into requests and the engine's work into outputs."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, cast

import torch

from infer import backends
from infer.artifact import JUST_IN_TIME, Artifact
from infer.blocks import BlockPool
from infer.cuda_graphs import CudaCapture, with_graphs
from infer.device import check_device
from infer.draft_vocab import read_draft_vocabs
from infer.engine import Engine
from infer.inputs import Prompt, as_list
from infer.manifest import BuildInfo, Manifest
from infer.output import RequestOutput
from infer.params import SamplingParams
from infer.payoff import Payoff
from infer.plan import Conditions, Plan, read_plan
from infer.pool_size import default_num_blocks
from infer.prefix_cache import PrefixCache
from infer.request import Request
from infer.request_maker import Messages, RequestMaker
from infer.round_maker import make_round
from infer.runner import Program, Runner
from infer.sprinter import read_classifier
from infer.stage import Stage, num_scratch_blocks
from infer.strategy import LOSSY, STRATEGIES, Policy, most_scored, rule_of, stages_of
from infer.tokenizer import load_tokenizer


class LLM:
    """Generates with an exported model, exactly as its target alone would.

    Args:
        artifact: folder that `python -m export` wrote; one that was opened before isn't checked again.
        strategy: one of `strategy.STRATEGIES`; `auto` follows the artifact's plan.json, which `python -m infer plan`
            writes, and is `autoregressive` without one that holds here: see `follow_plan`.
        backend: `inductor`, `eager`, `onnx`, or `auto` for the fastest that the artifact holds. Several with commas
            between, as `inductor,eager`: the first that runs here, with a warning that says why none before it does.
            `compile` has torch.compile compile eager's programs at every start, which takes minutes; nothing was
            measured of the result, so `bitwise` holds no call back and a warning says so.
        dtype: `float32` or `bfloat16`, as exported; None takes the artifact's first.
        device: `cpu` or `cuda`, as exported.
        num_blocks: KV blocks in the pool; None sizes it to `max_num_seqs` rows at full length, at least one row, and
            at most 1 GiB on CPU, `gpu_memory_utilization` on CUDA.
        gpu_memory_utilization: share of the GPU's memory that may be in use, as in vLLM; weights and what other
            processes hold count, and the pool gets the rest.
        enforce_eager: no CUDA graphs, as in vLLM. On CPU there are none anyway.
        max_num_seqs: most sequences that run at once.
        max_num_prefill_tokens: most prompt tokens computed between two rounds of the sequences that decode.
        enable_prefix_caching: keep prompts' KV for later prompts of the same beginning, while there is room.
        bitwise: keep every call to the programs where a token's results have the same bits whatever is computed with
            it, as export measured. False is the fastest: a token may then depend on its neighbours in the batch and on
            the strategy, where two logits lie within the last bits of each other.
        num_draft_tokens, window, inner_rounds: the policy's γ, N_i and R; a plan brings its own.
        num_lookup_tokens, max_ngram, min_ngram: how many tokens are proposed out of a row's own text, and the most and
            fewest of its last tokens that are looked for there: vLLM's prompt_lookup_max and prompt_lookup_min.
        confidence_threshold: drafting stops early where the exit gives no id so much probability; 0 never does.
        lookahead_window, lookahead_ngram, lookahead_guesses: of `lookahead`: columns of the window that runs ahead of
            the text, tokens of the n-grams that it makes, and how many of these are verified at once.
        exit_threshold: of `adadecode`: the probability that an exit must give some id for the token to come from it.
        num_branches, branch_threshold: of `layerskip` and `ngram_layerskip`: beside what the exit drafted, so many of
            its other candidates are verified too, those to which it gives at least that probability.
        adaptive: decode a text plainly while speculation does not pay in it, and try again later (`payoff`). None: with
            `auto`, under the rule `identity`, where no text depends on it; without it a plan's strategy may be slower
            than plain decoding in such texts.
        verification: `identity` gives sampled requests plain decoding's very tokens; `rejection` accepts more of them
            and gives plain decoding's law. Greedy requests get the same tokens by either. What `rejection` says to a
            seed depends on what was drafted, and so, with exits that read the target's state (`context`), on the prefix
            cache and on preemption too, which change what they are given.
        allow_lossy: strategies may be chosen that do not give the target's own texts: `sprinter`.
        seed: draws the seeds of requests that bring none; None draws them from the system.
        programs: those that these options choose, loaded before by `backends.load`; None loads them.

    Raises:
        ValueError: anything that a user can set right, named with the remedy.
    """

    def __init__(
        self,
        artifact: str | os.PathLike[str] | Artifact,
        strategy: str = "auto",
        *,
        backend: str = "auto",
        dtype: str | None = None,
        device: str = "cpu",
        num_blocks: int | None = None,
        gpu_memory_utilization: float = 0.9,
        enforce_eager: bool = False,
        max_num_seqs: int = 16,
        max_num_prefill_tokens: int = 512,
        enable_prefix_caching: bool = False,
        bitwise: bool = True,
        num_draft_tokens: int = 2,
        window: int = 4,
        inner_rounds: int = 4,
        num_lookup_tokens: int = 8,
        max_ngram: int = 4,
        min_ngram: int = 2,
        confidence_threshold: float = 0.0,
        exit_threshold: float = 0.8,
        lookahead_window: int = 4,
        lookahead_ngram: int = 4,
        lookahead_guesses: int = 4,
        num_branches: int = 0,
        branch_threshold: float = 0.05,
        adaptive: bool | None = None,
        verification: str = "identity",
        allow_lossy: bool = False,
        seed: int | None = None,
        programs: Mapping[str, Program] | None = None,
    ) -> None:
        policy = Policy(
            num_draft_tokens=num_draft_tokens,
            window=window,
            inner_rounds=inner_rounds,
            num_lookup_tokens=num_lookup_tokens,
            max_ngram=max_ngram,
            min_ngram=min_ngram,
            confidence_threshold=confidence_threshold,
            exit_threshold=exit_threshold,
            lookahead_window=lookahead_window,
            lookahead_ngram=lookahead_ngram,
            lookahead_guesses=lookahead_guesses,
            num_branches=num_branches,
            branch_threshold=branch_threshold,
        )
        is_auto, strategy = strategy == "auto", "autoregressive" if strategy == "auto" else strategy
        for name, value, least in (
            ("max_num_seqs", max_num_seqs, 1),
            ("max_num_prefill_tokens", max_num_prefill_tokens, 1),
            ("num_blocks", 2 if num_blocks is None else num_blocks, 2),  # one of them is the null block
        ):
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"{name}={value!r} must be a whole number of at least {least}")
        for name, flag in (("bitwise", bitwise), ("enforce_eager", enforce_eager), ("allow_lossy", allow_lossy)):
            if not isinstance(flag, bool):
                raise ValueError(f"{name}={flag!r} must be True or False")
        if adaptive:
            _check_adaptive(strategy, verification)
        if not 0 < gpu_memory_utilization <= 1:
            raise ValueError(f"gpu_memory_utilization={gpu_memory_utilization} must lie in (0, 1]")
        check_device(device)
        opened = artifact if isinstance(artifact, Artifact) else Artifact.open(artifact)
        self.manifest: Manifest = opened.manifest
        if max_num_seqs > self.manifest.limits.max_batch:
            raise ValueError(
                f"max_num_seqs={max_num_seqs}: the artifact allows at most {self.manifest.limits.max_batch}"
            )
        self.artifact, self.allow_lossy = opened, allow_lossy
        stages = self._stages(strategy, policy)
        rule = rule_of(verification, stages, self.manifest)
        chosen = opened.select(backend, dtype, device)
        self.build = chosen.build
        self.backend, self.dtype = chosen.build.backend, chosen.build.dtype
        torch_dtype = getattr(torch, self.dtype)
        has_graphs = device == "cuda" and not enforce_eager and self.backend in backends.CAPTURED
        self.conditions = Conditions.here(
            opened, chosen.build, bitwise=bitwise, cuda_graphs=has_graphs, verification=verification
        )
        self.plan: Plan | None = read_plan(opened, self.conditions) if is_auto else None
        for note in _unproved_bits(chosen.build, device, bitwise):
            warnings.warn(note, stacklevel=2)
        self.tokenizer = load_tokenizer(opened.path)
        self._maker = RequestMaker(self.tokenizer, self.manifest, seed)
        draft_vocabs = read_draft_vocabs(opened, device)
        if programs is None:
            programs = backends.load(opened, chosen)
        if num_blocks is None:
            planned = [(one.chosen.strategy, one.chosen.policy) for one in (self.plan.entries if self.plan else ())]
            chosen_stages = [stages, *(self._stages(*one) for one in planned)]
            num_blocks = default_num_blocks(
                self.manifest,
                torch_dtype.itemsize,
                max_num_seqs,
                device=device,
                gpu_memory_utilization=gpu_memory_utilization,
                num_scored=max(most_scored(one, self.manifest) for one in (policy, *(one for _, one in planned))),
                num_scratch_blocks=max(num_scratch_blocks(one, self.manifest.block_size) for one in chosen_stages),
            )
        self.max_num_seqs, self._has_graphs = max_num_seqs, has_graphs
        self._programs = programs
        runner = Runner(
            self.manifest,
            self._graphed(bitwise),
            chosen.build.programs,
            draft_vocabs,
            num_blocks=num_blocks,
            max_num_seqs=max_num_seqs,
            dtype=torch_dtype,
            device=torch.device(device),
            bitwise=bitwise,
        )
        pool = BlockPool(num_blocks, self.manifest.block_size)
        cache = PrefixCache(pool, runner.prefill_chunk) if enable_prefix_caching else None
        self.engine = Engine(
            runner, make_round(runner, stages, rule), pool, max_num_seqs, max_num_prefill_tokens, cache
        )
        self._payoffs: dict[tuple[str, Policy], Payoff] = {}  # what was learnt of each setting
        self._follows_adaptively = adaptive is not False and verification == "identity"
        self._set(strategy, policy, verification, adaptive=bool(adaptive))
        self.follow_plan(max_num_seqs)

    def use(
        self,
        strategy: str,
        policy: Policy | None = None,
        *,
        verification: str = "identity",
        bitwise: bool | None = None,
        adaptive: bool = False,
    ) -> None:
        """Switch to another strategy over the same programs and pages, while no request is running; no plan is followed
        from then on.

        Args:
            bitwise, adaptive: as at construction; None leaves bitwise as it is.

        Raises:
            ValueError: unknown strategy, or numbers that the artifact does not allow.
        """
        self._switch(strategy, policy or Policy(), verification, adaptive=adaptive)
        self.plan = None
        runner = self.engine.runner
        if bitwise is not None and bitwise != runner.bitwise:
            runner.bind(self._graphed(bitwise), bitwise=bitwise)
            self._payoffs.clear()  # calls take other times
            self._set(self.strategy, self.policy, verification, adaptive=adaptive)

    def supported(self, policy: Policy, verifications: Sequence[str] = ("identity",)) -> list[str]:
        """The strategies that the artifact has the exits for, with queries within its limits, under all these rules;
        lossy ones if allowed."""
        names = []
        for name in STRATEGIES:
            with suppress(ValueError):
                stages = self._stages(name, policy)
                for verification in verifications:
                    rule_of(verification, stages, self.manifest)
                names.append(name)
        return names

    def follow_plan(self, num_rows: int) -> None:
        """Take the plan's strategy for so many rows at once, if there is a plan and no request is running.

        `generate` asks for its number of texts, `stream` for its one prompt's, `AsyncLLM` for `max_num_seqs`, as any
        number may come. Requests keep the strategy that they began with: a lower exit could not catch up with a long
        text that was decoded without it.
        """
        if self.plan is None or self.engine.has_unfinished:
            return
        chosen = self.plan.entry_for(min(num_rows, self.max_num_seqs)).chosen
        if (chosen.strategy, chosen.policy) != (self.strategy, self.policy):
            self._switch(chosen.strategy, chosen.policy, self.verification, adaptive=self._follows_adaptively)

    @property
    def judge_names(self) -> tuple[str, ...]:
        """Names of the stages' tiers, by depth; the first of several only proposes."""
        return tuple(self.manifest.tiers[stage.tier].name for stage in self.engine.round.stages)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts; outputs come in the prompts' order.

        Args:
            prompts: one prompt or a list of them, each a text, a list of token ids, or `{"prompt_token_ids": [...]}`.
            sampling_params: one for all prompts, or one each.

        Raises:
            ValueError: a prompt is empty or too long, before anything has run.
        """
        outputs = dict(self.as_completed(prompts, sampling_params))
        return [outputs[number] for number in range(len(outputs))]

    def as_completed(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Iterator[tuple[int, RequestOutput]]:
        """As `generate`, but each output as soon as it is complete, with its prompt's number.

        Closing the iterator early aborts the rest.
        """
        each = as_list(prompts)
        params = self._params(each, sampling_params)
        self.follow_plan(sum(one.n for one in params))
        requests = self._requests(each, params)
        for request in requests:
            for choice in (request, *request.siblings):
                choice.is_streamed = False
            self.engine.add(request)
        pending = dict(zip(requests, range(len(requests)), strict=True))
        try:
            while pending:
                touched = dict.fromkeys(request.leader or request for request in self.engine.step())
                # Steps of another caller may have finished some of ours
                for request in [one for one in touched if one in pending] or list(pending):
                    if request.is_answered:
                        yield pending.pop(request), request.output()
        finally:
            for request in pending:
                self.engine.abort(request.request_id)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or a list of them, each a list of `{"role": …, "content": …}`.

        tools: descriptions of functions, as OpenAI's API has them, for the chat template to tell the model of.
        """
        is_one = not messages or isinstance(messages[0], Mapping)  # an empty one is refused by chat_prompt
        conversations = [messages] if is_one else list(messages)
        return self.generate([self.chat_prompt(cast(Messages, c), tools) for c in conversations], sampling_params)

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[RequestOutput]:
        """Complete one prompt, giving the output so far after every round; the last one is finished.

        Closing the iterator early aborts the request.
        """
        params = self._params([prompt], sampling_params)
        self.follow_plan(params[0].n)
        (request,) = self._requests([prompt], params)
        self.engine.add(request)
        try:
            while True:
                if not request.is_answered:  # another caller's steps may have finished it
                    self.engine.step()
                output = request.output()
                yield output
                if output.finished:
                    return
        finally:
            self.engine.abort(request.request_id)

    def chat_prompt(self, messages: Messages, tools: Sequence[Mapping[str, Any]] | None = None) -> list[int]:
        """Token ids of a conversation, up to where the assistant's turn begins.

        Raises:
            ValueError: there is no template, or it refuses these messages or knows no tools.
        """
        return self._maker.chat_prompt(messages, tools)

    def make_request(
        self, prompt: Prompt, params: SamplingParams, request_id: str | None = None, *, number: int = 0
    ) -> Request:
        """The engine's record of a prompt, to be added to it; nothing runs yet.

        Raises:
            ValueError: the prompt is empty or too long (it is called `number` there), or what `params` want can't be
                done by this model.
        """
        request = self._maker.make(prompt, params, request_id, number, self.judge_names)
        self.engine.check_fits(request)
        return request

    # ---- internals ----

    def _graphed(self, bitwise: bool) -> Mapping[str, Program]:
        """The programs as they are called: on CUDA behind graphs."""
        if not self._has_graphs:
            return self._programs
        return with_graphs(
            # branches make more rows of a call than there are sequences
            self._programs,
            self.build.programs,
            self.manifest,
            self.manifest.limits.max_batch,
            CudaCapture(),
            bitwise,
        )

    def _stages(self, strategy: str, policy: Policy) -> list[Stage]:
        if strategy in LOSSY and not self.allow_lossy:
            raise ValueError(
                f"strategy={strategy!r} is lossy: it keeps tokens that the target has not verified; give "
                "allow_lossy=True (--allow-lossy) if you want that, or take another strategy: all others are exact"
            )
        return stages_of(
            strategy, policy, self.manifest, read_classifier(self.artifact) if strategy == "sprinter" else None
        )

    def _switch(self, strategy: str, policy: Policy, verification: str, *, adaptive: bool) -> None:
        stages = self._stages(strategy, policy)
        rule = rule_of(verification, stages, self.manifest)
        if self.engine.has_unfinished:
            raise ValueError("requests are running: finish or close their stream before choosing another strategy")
        if adaptive:
            _check_adaptive(strategy, verification)
        self.engine.round = make_round(self.engine.runner, stages, rule)
        self._set(strategy, policy, verification, adaptive=adaptive)

    def _set(self, strategy: str, policy: Policy, verification: str, *, adaptive: bool) -> None:
        self.strategy, self.policy, self.verification = strategy, policy, verification
        has_choice = adaptive and strategy != "autoregressive"
        self.engine.payoff = self._payoffs.setdefault((strategy, policy), Payoff()) if has_choice else None

    @staticmethod
    def _params(
        prompts: Sequence[Prompt], sampling_params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[SamplingParams]:
        """One for each prompt."""
        params = sampling_params if sampling_params is not None else SamplingParams()
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(prompts):
            raise ValueError(f"{len(each)} sampling_params for {len(prompts)} prompts: give one, or one for each")
        return each

    def _requests(self, prompts: Sequence[Prompt], params: Sequence[SamplingParams]) -> list[Request]:
        pairs = enumerate(zip(prompts, params, strict=True))
        return [self.make_request(prompt, one, number=number) for number, (prompt, one) in pairs]


def _check_adaptive(strategy: str, verification: str) -> None:
    if verification != "identity" or strategy in LOSSY:
        what = f"strategy={strategy!r}" if strategy in LOSSY else f"verification={verification!r}"
        raise ValueError(
            f"adaptive=True with {what}: its texts depend on what is drafted, so they would hang on how long calls "
            "take: leave it out, or take an exact strategy under the rule of identity"
        )


def _unproved_bits(build: BuildInfo, device: str, bitwise: bool) -> Iterator[str]:
    """Why the last bits of these programs may not be what `bitwise` promises here, in words."""
    if device == "cpu" and build.num_threads != torch.get_num_threads():
        yield (
            f"{build.folder_name} was measured with {build.num_threads} threads and runs with "
            f"{torch.get_num_threads()}: identity of the last bits is not proved there; call "
            f"torch.set_num_threads({build.num_threads}), or export again"
        )
    if unproved := build.unproved():
        yield (
            f"{build.folder_name} was measured elsewhere ({'; '.join(unproved)}): identity of the last bits is not "
            "proved here; export again to have it measured"
        )
    if build.backend == JUST_IN_TIME and bitwise:
        yield (
            "backend='compile': in which calls such programs give a token the same bits is measured by nobody, so a "
            "strategy may take another token than plain decoding where two logits lie within the last bits of each "
            "other; bitwise=False says the same and silences this, backend='inductor' has it measured"
        )
