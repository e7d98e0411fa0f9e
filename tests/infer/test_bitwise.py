"""Calls stay in the range of equal bits, unless the user gives that up."""

import pytest

from infer.params import SamplingParams
from infer.strategy import Policy
from tests.tiny_engine import PROMPTS, STRATEGIES, Tiny, model_of

PARAMS = SamplingParams(temperature=0, max_tokens=10)
RANGE = (2, 4)


def cells_of_decoding(tiny: Tiny) -> tuple[list[int], list[list[int]]]:
    """How many cells each call over pages had once the prompts were computed, and the texts."""
    requests = [tiny.request(prompt, PARAMS) for prompt in PROMPTS[:4]]
    for request in requests:
        tiny.engine.add(request)
    tiny.engine.step()
    cells: list[int] = []

    def counted(program):
        def run(x, positions, *rest):
            cells.append(positions.numel())
            return program(x, positions, *rest)

        return run

    for programs in (tiny.runner._trunks, [e for e in tiny.runner._exits if e[2]]):
        for number, (program, *rest) in enumerate(programs):
            programs[number] = (counted(program), *rest)
    tiny.drain()
    return cells, [request.token_ids for request in requests]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_without_bitwise_no_call_is_cut_or_padded(strategy: str) -> None:
    policy = Policy(exit_threshold=0.0)  # so that adadecode drafts
    kept, texts = cells_of_decoding(Tiny(model_of(), strategy, policy, bitwise_range=RANGE))
    free, free_texts = cells_of_decoding(Tiny(model_of(), strategy, policy, bitwise_range=RANGE, bitwise=False))
    unranged, _ = cells_of_decoding(Tiny(model_of(), strategy, policy))
    assert free_texts == texts
    assert all(RANGE[0] <= cells <= RANGE[1] for cells in kept)
    assert free == unranged
    assert len(free) < len(kept) or strategy == "autoregressive"
    assert max(free) >= len(PROMPTS[:4])


def test_bits_can_be_given_up_and_asked_for_again() -> None:
    tiny = Tiny(model_of(), "hispec", bitwise_range=RANGE, bitwise=False)
    one = PROMPTS[:1]
    first = [r.token_ids for r in tiny.generate(one, PARAMS)]
    tiny.runner.bind(tiny.runner.programs, bitwise=True)
    cells, _ = cells_of_decoding(tiny)
    assert all(RANGE[0] <= number <= RANGE[1] for number in cells)
    assert [r.token_ids for r in tiny.generate(one, PARAMS)] == first
