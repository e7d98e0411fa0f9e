"""`LLM`: an artifact, ready to generate. Turns prompts into requests and the engine's work into outputs."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from infer.artifact import Artifact
from infer.chooser import StrategyChooser
from infer.device import check_device
from infer.engine_loader import EngineLoader
from infer.engine_options import EngineOptions
from infer.inputs import Prompt, as_list, params_of_each
from infer.manifest import Manifest
from infer.output import RequestOutput
from infer.params import SamplingParams
from infer.plan import Plan, read_plan
from infer.repertoire import Repertoire, check_adaptive
from infer.request import Request
from infer.request_maker import Messages, RequestMaker
from infer.runner import Program
from infer.strategy import Policy, Setting
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
        workload: the kind of text that `auto` follows its plan for, by the name of the prompt file that it was planned
            with (`infer plan --by-workload`); empty: any.
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
        workload: str = "",
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
        options = EngineOptions(
            num_blocks=num_blocks,
            gpu_memory_utilization=gpu_memory_utilization,
            enforce_eager=enforce_eager,
            max_num_seqs=max_num_seqs,
            max_num_prefill_tokens=max_num_prefill_tokens,
            enable_prefix_caching=enable_prefix_caching,
            bitwise=bitwise,
        )
        is_auto, strategy = strategy == "auto", "autoregressive" if strategy == "auto" else strategy
        if not isinstance(allow_lossy, bool):
            raise ValueError(f"allow_lossy={allow_lossy!r} must be True or False")
        if adaptive:
            check_adaptive(strategy, verification)
        if workload and not is_auto:
            raise ValueError(
                f"workload={workload!r} chooses within a plan, which strategy={strategy!r} does not follow: "
                "leave out one of them"
            )
        check_device(device)
        self.artifact = artifact if isinstance(artifact, Artifact) else Artifact.open(artifact)
        self.manifest: Manifest = self.artifact.manifest
        options.check_limits(self.manifest)
        setting = Setting(strategy, policy)
        self._repertoire = Repertoire(self.artifact, allow_lossy=allow_lossy)
        self._repertoire.parts(setting, verification)  # refused before anything is loaded
        chosen = self.artifact.select(backend, dtype, device)
        self.build, self.backend, self.dtype = chosen.build, chosen.build.backend, chosen.build.dtype
        self.max_num_seqs = max_num_seqs
        self._loader = EngineLoader(self.artifact, chosen, options, programs)
        self.conditions = self._loader.conditions(verification)
        plan = read_plan(self.artifact, self.conditions) if is_auto else None
        if plan is not None and workload:
            plan.check_workload(workload)
        for note in self._loader.unproved_bits():
            warnings.warn(note, stacklevel=2)
        self.tokenizer = load_tokenizer(self.artifact.path)
        self._maker = RequestMaker(self.tokenizer, self.manifest, seed)
        settings = [setting, *(plan.settings if plan else ())]
        self.engine = self._loader.load(self._repertoire, settings, verification)
        self._chooser = StrategyChooser(
            self.engine, self._repertoire, setting, verification, plan=plan, workload=workload, adaptive=adaptive
        )
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
        self._chooser.use(Setting(strategy, policy or Policy()), verification, adaptive=adaptive)
        runner = self.engine.runner
        if bitwise is not None and bitwise != runner.bitwise:
            runner.bind(self._loader.programs(bitwise), bitwise=bitwise)
            self._chooser.forget_payoffs()

    def supported(self, policy: Policy, verifications: Sequence[str] = ("identity",)) -> list[str]:
        """The strategies that the artifact has the exits for, with queries within its limits, under all these rules;
        lossy ones if allowed."""
        return self._repertoire.supported(policy, verifications)

    def follow_plan(self, num_rows: int) -> None:
        """Take the plan's strategy for so many rows at once, if there is a plan and no request is running.

        `generate` asks for its number of texts, `stream` for its one prompt's, `AsyncLLM` for `max_num_seqs`, as any
        number may come. Requests keep the strategy that they began with: a lower exit could not catch up with a long
        text that was decoded without it.
        """
        self._chooser.follow_plan(min(num_rows, self.max_num_seqs))

    @property
    def plan(self) -> Plan | None:
        """The plan that is followed; None: none is."""
        return self._chooser.plan

    @property
    def strategy(self) -> str:
        """The strategy that runs now."""
        return self._chooser.setting.strategy

    @property
    def policy(self) -> Policy:
        """Its numbers."""
        return self._chooser.setting.policy

    @property
    def verification(self) -> str:
        """The rule by which drafted tokens are accepted."""
        return self._chooser.verification

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
        params = params_of_each(each, sampling_params)
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
        params = params_of_each([prompt], sampling_params)
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

    def _requests(self, prompts: Sequence[Prompt], params: Sequence[SamplingParams]) -> list[Request]:
        pairs = enumerate(zip(prompts, params, strict=True))
        return [self.make_request(prompt, one, number=number) for number, (prompt, one) in pairs]
