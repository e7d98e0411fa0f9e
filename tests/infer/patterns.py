"""Which of the lower exits' picks are right, as scripts for `Script`; the target's verdicts follow from them."""

from collections.abc import Callable

# (row, tier, tokens since the last committed one, round) → whether the exit is right
PATTERNS: dict[str, Callable[[int, int, int, int], bool]] = {
    "accept all": lambda row, tier, offset, number: True,
    "reject all": lambda row, tier, offset, number: False,
    "reject at 1": lambda row, tier, offset, number: offset != 1,
    "reject from 3": lambda row, tier, offset, number: offset < 3,
    "alternate by row and round": lambda row, tier, offset, number: (row + number) % 2 == 0,
    "rotate 0, 1, γ": lambda row, tier, offset, number: offset < (0, 1, 99)[(row + number) % 3],
    "draft right, intermediate wrong": lambda row, tier, offset, number: tier == 0,
    "draft wrong, intermediate right": lambda row, tier, offset, number: tier == 1,
    "tiers take turns": lambda row, tier, offset, number: (offset + tier + number) % 2 == 0,
}
