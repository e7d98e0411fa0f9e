import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from infer.verify import accepted_prefix_lengths, judge, mean_acceptance_length, verify


def reference(drafted: list[int], num_drafted: int, picks: list[int]) -> tuple[int, int]:
    num_accepted = 0
    for token, own in zip(drafted[:num_drafted], picks, strict=False):
        if token != own or own < 0:
            break
        num_accepted += 1
    return num_accepted, picks[num_accepted]


@st.composite
def rounds(draw):
    num_rows, num_columns = draw(st.integers(1, 4)), draw(st.integers(0, 5))
    token = st.integers(-1, 2)
    rows = [
        (
            draw(st.lists(token, min_size=num_columns, max_size=num_columns)),
            draw(st.integers(0, num_columns)),
            draw(st.lists(token, min_size=num_columns + 1, max_size=num_columns + 1)),
        )
        for _ in range(num_rows)
    ]
    return rows, num_columns


@given(rounds())
def test_verify_equals_the_reference_row_by_row(case):
    rows, num_columns = case
    drafted = torch.tensor([r[0] for r in rows], dtype=torch.int64).view(len(rows), num_columns)
    num_drafted = torch.tensor([r[1] for r in rows])
    verdict = verify(drafted, num_drafted, torch.tensor([r[2] for r in rows]))
    assert list(zip(verdict.num_accepted.tolist(), verdict.own_token.tolist(), strict=True)) == [
        reference(*row) for row in rows
    ]
    assert [judge(drafted[:num], picks[: num + 1]) for drafted, num, picks in rows] == [reference(*row) for row in rows]
    assert ((verdict.num_accepted >= 0) & (verdict.num_accepted <= num_drafted)).all()


def test_the_first_drafted_token_is_judged_too():
    # Known failure A04: draft[0] was always taken, because draft[i + 1] was compared with the choice after draft[i].
    assert [t.item() for t in verify(torch.tensor([[1]]), torch.tensor([1]), torch.tensor([[9, 5]]))] == [0, 9]
    verdict = verify(torch.tensor([[1, 5, 6]]), torch.tensor([3]), torch.tensor([[9, 5, 6, 7]]))
    assert [t.item() for t in verdict] == [0, 9]


def test_all_accepted_gives_the_bonus_token_and_none_drafted_gives_the_own_token():
    picks = torch.tensor([[4, 5, 6], [4, 5, 6]])
    verdict = verify(torch.tensor([[4, 5], [4, 5]]), torch.tensor([2, 0]), picks)
    assert verdict.num_accepted.tolist() == [2, 0]
    assert verdict.own_token.tolist() == [6, 4]


def test_a_broken_judge_accepts_nothing_and_shows_it():
    verdict = verify(torch.tensor([[-1, 5]]), torch.tensor([2]), torch.tensor([[-1, 5, 6]]))
    assert [t.item() for t in verdict] == [0, -1]


def test_accepted_prefix_lengths_stops_at_the_first_miss():
    matches = torch.tensor([[1, 1, 1], [1, 0, 1], [0, 1, 1]]).bool()
    assert accepted_prefix_lengths(matches).tolist() == [3, 1, 0]


def test_mean_acceptance_length_counts_the_judges_own_token():
    assert mean_acceptance_length(30, 10) == pytest.approx(4.0)
    assert mean_acceptance_length(0, 10) == mean_acceptance_length(0, 0) == 1.0
