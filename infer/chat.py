"""A conversation in a terminal or a pipe: lines in, answers out, and commands that begin with a slash.

Answers go to one console, everything else to another, so that a pipe gets nothing but answers. Knows no options.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from rich.console import Console
from rich.text import Text

from infer.llm import LLM
from infer.output import CompletionOutput, RequestOutput, TierMetrics
from infer.params import SamplingParams
from infer.server.tiers import TierReport
from infer.strategy import STRATEGIES, Policy
from infer.terminal import STYLES, Splitter, printable

HELP = """\
/stats            tokens, speed and acceptance per tier, of the last answer and of all
/strategy [NAME]  decode in another way from now on; without a name: which there are
/clear            begin a new conversation
/help             this text
/quit             leave, as does the end of input (Ctrl-D)
Ctrl-C stops an answer. A line that begins with a space is never a command."""


@dataclass(slots=True)
class _Tally:
    """What was generated since the strategy was chosen."""

    num_tokens: int = 0
    num_later: int = 0  # tokens after each answer's first, which `seconds` were spent on
    seconds: float = 0.0
    tiers: dict[str, list[int]] = field(default_factory=dict)  # judge → [num_drafts, num_draft_tokens, num_accepted]

    def add(self, output: RequestOutput) -> None:
        num_tokens, each = len(output.outputs[0].token_ids), output.metrics.time_per_output_token
        self.num_tokens += num_tokens
        if each is not None:
            self.num_later += num_tokens - 1
            self.seconds += each * (num_tokens - 1)
        for tier in output.metrics.tiers:
            counts = self.tiers.setdefault(tier.tier, [0, 0, 0])
            for i, value in enumerate((tier.num_drafts, tier.num_draft_tokens, tier.num_accepted)):
                counts[i] += value

    def __str__(self) -> str:
        said = [f"{self.num_tokens} tokens"]
        if self.seconds:
            said.append(f"{self.num_later / self.seconds:.1f} tokens/s")
        for name, (num_drafts, num_draft_tokens, num_accepted) in self.tiers.items():
            if num_draft_tokens:
                length = TierMetrics(name, num_drafts, num_draft_tokens, num_accepted).mean_acceptance_length
                said.append(f"{name} accepted {num_accepted / num_draft_tokens:.0%}, mean length {length:.2f}")
        return " · ".join(said)


class Chat:
    """
    Args:
        policy: the numbers of strategies that are chosen later.
        out: gets the answers.
        notes: gets what is said about them.
        shows_tiers: colour each token by the tier that picked it first; on a terminal alone.
    """

    def __init__(
        self,
        llm: LLM,
        params: SamplingParams,
        policy: Policy,
        out: Console,
        notes: Console,
        *,
        system: str | None = None,
        shows_tiers: bool = False,
    ) -> None:
        self._llm, self._params, self._policy, self._out, self._notes = llm, params, policy, out, notes
        self._opening = [] if system is None else [{"role": "system", "content": system}]
        self._messages = list(self._opening)
        self._tiers = TierReport(llm) if shows_tiers and out.is_terminal else None
        self._last, self._all = _Tally(), _Tally()
        self.num_failed = 0  # lines that got no whole answer
        self._commands = {
            "/stats": self._say_stats,
            "/strategy": self._choose_strategy,
            "/clear": self._clear,
            "/help": lambda _: self._note(HELP),
        }

    def run(self, lines: Iterable[str]) -> None:
        """Until the lines end, or one of them is /quit."""
        for line in lines:
            name, _, rest = line.strip().partition(" ")
            if not name:
                continue
            if not line.startswith("/"):
                self._answer(line.strip())
            elif name == "/quit":
                return
            elif name in self._commands:
                self._commands[name](rest.strip())
            else:
                self._fail(f"{name} is no command: /help lists them; begin the line with a space to send it")

    # ---- answers ----

    def _answer(self, text: str) -> None:
        self._messages.append({"role": "user", "content": text})
        try:
            prompt = self._llm.chat_prompt(self._messages)
            output, was_stopped = self._stream(prompt)
        except ValueError as error:
            self._messages.pop()
            self._fail(f"{error}" + ("; /clear begins anew" if len(self._messages) > 1 else ""))
            return
        if output is None:
            self._messages.pop()
            return
        done = output.outputs[0]
        self._messages.append({"role": "assistant", "content": done.text})
        self._last = _Tally()
        for tally in (self._last, self._all):
            tally.add(output)
        if was_stopped:
            self._note("stopped")
        elif done.finish_reason == "error":
            self._fail(f"the answer is incomplete: {done.stop_reason}")

    def _stream(self, prompt: list[int]) -> tuple[RequestOutput | None, bool]:
        """What was answered as far as it came, and whether Ctrl-C ended it."""
        output, shown, num_tokens, splitter = None, 0, 0, Splitter()
        with _ctrl_c() as pressed:
            stream = self._llm.stream({"prompt_token_ids": prompt}, self._params)
            for output in stream:
                done = output.outputs[0]
                self._show(done, output, shown, num_tokens, splitter)
                shown, num_tokens = len(done.text), len(done.token_ids)
                if pressed:
                    break
            stream.close()  # type: ignore[attr-defined]
        for part, tier in splitter.split("", (), is_last=True):
            self._paint(part, tier)
        self._out.file.write("\n")
        self._out.file.flush()
        return output, bool(pressed) and output is not None and not output.finished

    def _show(
        self, done: CompletionOutput, output: RequestOutput, shown: int, num_tokens: int, splitter: Splitter
    ) -> None:
        new = done.text[shown:]
        if self._tiers is None:
            self._out.file.write(printable(new) if self._out.is_terminal else new)
            self._out.file.flush()
            return
        tokens = self._tiers.of(done, num_tokens, output.metrics)["tokens"]
        for part, tier in splitter.split(new, tokens, done.finish_reason is not None):
            self._paint(part, tier)

    def _paint(self, text: str, tier: str) -> None:
        self._out.print(Text(printable(text), style=STYLES.get(tier, "")), end="", soft_wrap=True)

    # ---- commands ----

    def _say_stats(self, _: str) -> None:
        self._note(f"strategy {self._llm.strategy}\nlast answer: {self._last}\nall answers: {self._all}")

    def _choose_strategy(self, name: str) -> None:
        if not name:
            names = ", ".join(STRATEGIES)
            self._note(f"strategy {self._llm.strategy}; there are {names}")
            return
        try:
            self._llm.use(name, self._policy, verification=self._llm.verification)
        except ValueError as error:
            self._fail(str(error))
            return
        self._all = _Tally()  # acceptance of two strategies in one figure would say nothing
        self._note(f"strategy {name}")

    def _clear(self, _: str) -> None:
        self._messages = list(self._opening)
        self._note("a new conversation")

    def _note(self, text: str) -> None:
        self._notes.print(Text(text, style="dim"), soft_wrap=True)

    def _fail(self, text: str) -> None:
        self.num_failed += 1
        self._notes.print(Text(f"error: {text}", style="red"), soft_wrap=True)


@contextmanager
def _ctrl_c() -> Iterator[list[int]]:
    """Filled by the first Ctrl-C, which then ends the answer between two rounds; a second one ends the program."""
    pressed: list[int] = []

    def note(number: int, _: object) -> None:
        pressed.append(number)
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)
