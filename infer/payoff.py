"""Whether speculation pays, learnt while decoding, so that a text that an exit can't foresee is decoded plainly.

A speculating round takes longer than a plain one and gives more tokens. What both take is timed, for each number of
rows; what a round gives is judged for each row, since it is the text that decides it: by its own latest rounds, and by
what texts usually gain, which stands for a few rounds more. Few rounds prove little, as one gives one token or six, and
a row's own count for less with each that follows. Rows decode plainly while their gain would not pay for the longer
round, and speculation is tried again later, after ever longer pauses.

What exits take of a prompt must be paid too, and a short answer to a long prompt may never do that. Where none is
expected to, the prompt is computed without them (`Row.exits_wait`), and they catch up with it once it is: when the
text's own gain pays for that, or as a trial, for which a small share of plain decoding's time is set aside.

Texts do not change with any of this as long as the rule is that of identity: a token is plain decoding's whether it was
drafted or not.
"""

from __future__ import annotations

import statistics
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from infer.row import Row

KEPT = 9  # times of the latest rounds, whose median counts: a stall of the machine must not decide anything
FEWEST_PLAIN, FEWEST_SPECULATING = 3, 3  # rounds before their times are believed
NUM_UNTIMED = 2  # speculating rounds after a plain one: the first also brings exits up to the rows' ends
SHORT = 255  # tokens of a row, up to which attention takes next to no time
ROUNDS_BETWEEN_PLAIN = 64  # while speculation pays: a plain round now and then, as costs drift
SHORTEST_PAUSE, LONGEST_PAUSE = 8, 128  # plain rounds before speculation is tried again
FADING = 0.95  # what a row's evidence still counts for after each further speculating round
LIKELY_SHARE = 0.5  # of the tokens that a text may get, which it gets in the mean: many end by themselves
TRIAL_SHARE = 0.02  # of plain rounds' time: what exits may take of prompts for a mere trial
NUM_USUAL = 4.0  # rounds of the row's own that the usual gain weighs as much as
USUAL_WEIGHT = 0.02  # of the latest round in the usual gain


@dataclass(slots=True)
class _Size:
    """What is known of rounds that take about as long."""

    plain: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))  # seconds
    speculating: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))
    num_paying: int = 0  # speculating rounds since the last plain one
    pause: int = SHORTEST_PAUSE
    num_left: int = 0  # plain rounds of this pause

    def break_even(self) -> float:
        """Tokens that a speculating round must give each row to be worth its time."""
        return statistics.median(self.speculating) / statistics.median(self.plain)

    def saved(self, gain: float, num_to_come: float) -> float:
        """Seconds that speculation should save at `gain` a round while each row gets at most so many tokens; while its
        times are unknown, as if its rounds took no longer than plain ones."""
        break_even = self.break_even() if len(self.speculating) >= FEWEST_SPECULATING else 1.0
        return statistics.median(self.plain) * LIKELY_SHARE * num_to_come * (1 - break_even / max(gain, 1.0))


class Payoff:
    """Of one setting: another one has other costs."""

    def __init__(self) -> None:
        self._sizes: dict[tuple[int, int], _Size] = defaultdict(_Size)
        self._usual = 0.0  # tokens that a speculating round gives a row
        self._num_speculating = 0  # rounds without a plain one between them, up to now
        self._fill_seconds = 0.0  # of a token, when exits catch up with a prompt
        self._set_aside = 0.0  # seconds that such trials may take now

    def choose(self, rows: Sequence[Row]) -> bool:
        """Whether the next round speculates, which is written into its rows."""
        is_speculating = self._pays(rows)
        for row in rows:
            row.speculates = is_speculating and row.params.speculate
        return any(row.speculates for row in rows)

    def _pays(self, rows: Sequence[Row]) -> bool:
        size = self._size_of(len(rows), sum(map(len, rows)) // len(rows))
        if len(size.plain) < FEWEST_PLAIN:
            return False
        gain = statistics.fmean(self._gain(row) if row.params.speculate else 1.0 for row in rows)
        cost = self._fill_seconds * sum(len(row) for row in rows if row.exits_wait and row.params.speculate)
        is_repaid = cost == 0 or size.saved(gain, statistics.fmean(row.max_len - len(row) for row in rows)) > cost
        if len(size.speculating) < FEWEST_SPECULATING:
            return is_repaid or cost <= self._set_aside
        if gain > size.break_even() and is_repaid:
            size.pause, size.num_left = SHORTEST_PAUSE, 0
            size.num_paying = (size.num_paying + 1) % ROUNDS_BETWEEN_PLAIN
            return size.num_paying > 0
        size.num_left = max(0, size.num_left - 1)
        return size.num_left == 0 and cost <= self._set_aside

    def expects_gain(self, num_rows: int, num_to_come: int, num_prompt_tokens: int, exit_seconds: float) -> bool:
        """Whether a text among so many rows should repay what exits take of its prompt; True while times are unknown.

        num_to_come: most tokens that it may get.
        exit_seconds: of a prompt's token; counts for what catching up takes too, until that was timed.
        """
        self._fill_seconds = self._fill_seconds or exit_seconds
        size = self._size_of(num_rows, num_prompt_tokens)
        if len(size.plain) < FEWEST_PLAIN or len(size.speculating) < FEWEST_SPECULATING:
            return True
        return size.saved(self._usual, num_to_come) / num_rows > exit_seconds * num_prompt_tokens

    def note_fill(self, num_tokens: int, seconds: float) -> None:
        """Exits have caught up with so many tokens of prompts."""
        self._fill_seconds = seconds / num_tokens
        self._set_aside = max(0.0, self._set_aside - seconds)

    def _size_of(self, num_rows: int, length: int) -> _Size:
        """What is known of rounds of about so many rows of about so many tokens each: both within a factor of two."""
        return self._sizes[num_rows.bit_length(), max(length, SHORT).bit_length()]

    def _gain(self, row: Row) -> float:
        """Tokens that a speculating round is expected to give it."""
        return (NUM_USUAL * self._usual + row.num_gained) / (NUM_USUAL + row.num_speculated)

    def note(self, rows: Sequence[Row], num_gained: Sequence[int], seconds: float) -> None:
        """A round is done: tokens that each row gained, and what it took."""
        size = self._size_of(len(rows), (sum(map(len, rows)) - sum(num_gained)) // len(rows))
        speculated = [(row, number) for row, number in zip(rows, num_gained, strict=True) if row.speculates]
        num_before, self._num_speculating = self._num_speculating, self._num_speculating + 1 if speculated else 0
        if not speculated:
            size.plain.append(seconds)
            if any(row.exits_wait for row in rows):
                self._set_aside += TRIAL_SHARE * seconds
            return
        if num_before >= NUM_UNTIMED:
            size.speculating.append(seconds)
        for row, number in speculated:
            self._usual += (USUAL_WEIGHT if self._usual else 1.0) * (number - self._usual)
            row.num_gained = FADING * row.num_gained + number
            row.num_speculated = FADING * row.num_speculated + 1
        if len(size.speculating) <= FEWEST_SPECULATING or not size.plain:
            return
        if statistics.fmean(num_gained) <= size.break_even():  # a trial has failed; the pause counts if that is usual
            size.num_left = size.pause
            size.pause = min(2 * size.pause, LONGEST_PAUSE)
