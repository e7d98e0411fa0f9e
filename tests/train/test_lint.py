"""The lint finds what a wrong mask, a wrong prompt or a wrong author would hide."""

from io import StringIO

import pytest
from rich.console import Console

from tests.train.conftest import END
from tests.train.templates import CHATML, LLAMA3
from train.authorship import Surprise, surprise
from train.chat import Encoded
from train.formats import Encoder
from train.heads import ExitConfig
from train.lint import Answers, Lint, check_row, colored, label_runs, show_row
from train.model import EarlyExitModel

TURNS = [
    {"role": "user", "content": "The snow?"},
    {"role": "assistant", "content": "So slow"},
    {"role": "user", "content": "Know?"},
    {"role": "assistant", "content": "now"},
]


@pytest.fixture(scope="module")
def encoder():
    tokenizer = CHATML.tokenizer()
    return Encoder(tokenizer, [END], len(tokenizer))


def test_runs_are_the_stretches_of_labels():
    assert label_runs(Encoded([1] * 6, [True, False, True, True, False, True])) == [(0, 1), (2, 4), (5, 6)]
    assert label_runs(Encoded([1], [False])) == []


def test_a_mask_that_is_wrong_anywhere_is_refused(encoder):
    row = {"messages": TURNS}
    right = encoder(row)
    assert check_row(encoder, row, right) == Answers(2)
    runs = label_runs(right)
    wrong = {
        "nothing carries loss": [False] * len(right.loss_mask),
        "all carries loss": [True] * len(right.loss_mask),
        "begins one early": [m or n == runs[0][0] - 1 for n, m in enumerate(right.loss_mask)],
        "begins one late": [m and n != runs[1][0] for n, m in enumerate(right.loss_mask)],
        "reaches into the user's turn": [m or runs[0][0] < n < runs[0][1] + 4 for n, m in enumerate(right.loss_mask)],
        "ends early": [m and n < runs[1][1] - 2 for n, m in enumerate(right.loss_mask)],
        "a user's turn besides": [m or n == 2 for n, m in enumerate(right.loss_mask)],
        "the last answer is missing": [m and n < runs[1][0] for n, m in enumerate(right.loss_mask)],
    }
    for name, mask in wrong.items():
        with pytest.raises(ValueError, match=r"messages\[|prompt and the row differ|no assistant's turn"):
            check_row(encoder, row, Encoded(right.token_ids, mask))
            pytest.fail(name)


def test_a_label_behind_the_last_answer_is_refused(encoder):
    row = {"messages": [*TURNS, {"role": "user", "content": "Know?"}]}
    right = encoder(row)
    assert check_row(encoder, row, right) == Answers(2)
    with pytest.raises(ValueError, match="carries loss and is no assistant's turn"):
        check_row(encoder, row, Encoded(right.token_ids, [*right.loss_mask[:-1], True]))


def test_a_second_bos_at_serving_is_found():
    tokenizer = LLAMA3.tokenizer()
    encoder = Encoder(tokenizer, [tokenizer.eos_token_id], len(tokenizer))
    row = {"messages": TURNS[:2]}
    encoded = encoder(row)
    twice = Encoded([tokenizer.bos_token_id, *encoded.token_ids], [False, *encoded.loss_mask])
    with pytest.raises(ValueError, match="serving's prompt and the row differ"):
        check_row(encoder, row, twice)


def test_an_answer_that_merges_with_the_prompts_last_token_is_counted(tokenizer):
    plain = Encoder(tokenizer, [END], 320)
    plain.tokenizer = type(tokenizer)(tokenizer_object=tokenizer.backend_tokenizer, eos_token="<|im_end|>")
    for prompt, answer, merged in (("The s", "now", 1), ("The", " snow", 0)):
        row = {"prompt": prompt, "response": answer}
        assert check_row(plain, row, plain(row)) == Answers(1, 0, merged)


def lint_of(encoder, rows, max_length):
    lint = Lint("training", len(rows), max_length)
    for row in rows:
        whole = encoder(row)
        lint.add(whole, whole.clipped(max_length), check_row(encoder, row, whole), encoder.eos_token_ids)
    return lint


def test_counts_of_what_is_cut_and_what_carries_loss(encoder):
    rows = [{"messages": TURNS[:2]}, {"messages": [TURNS[0], {"role": "assistant", "content": "now " * 40}]}]
    whole = [encoder(row) for row in rows]
    cap = len(whole[0].token_ids)
    lint = lint_of(encoder, rows, cap)
    assert (lint.num_cut, lint.num_unlabelled, lint.num_tokens) == (1, 0, 2 * cap)
    assert lint.num_labels == whole[0].num_labels + whole[1].clipped(cap).num_labels
    assert lint.num_labels_cut == whole[1].num_labels - whole[1].clipped(cap).num_labels > 0
    assert "cuts away" in lint.notes()[0]
    assert f"1 cut at {cap} tokens" in str(lint)


def test_rows_that_are_dropped_and_ends_that_are_cut_away_are_no_longer_counted(encoder):
    cut_off = {"messages": [{"role": "user", "content": "Know? " * 9}, TURNS[1]]}
    row = {"messages": TURNS[:2]}
    whole = encoder(row)
    runs = label_runs(whole)
    lint = lint_of(encoder, [cut_off, row, {"token_ids": [5], "loss_mask": [1]}], runs[0][1] - 1)
    assert (lint.num_unlabelled, lint.num_used, lint.num_all_labels) == (2, 1, 0)
    assert (lint.num_tokens, lint.longest, lint.answers.num_turns) == (runs[0][1] - 1, runs[0][1] - 1, 1)
    assert lint.num_ended == 0 and any("teaches the exits to stop" in note for note in lint.notes())
    assert lint_of(encoder, [row], 100).num_ended == 1


def test_what_is_seldom_meant_is_noted(encoder):
    all_labels = {"token_ids": [5, 6, 7], "loss_mask": [1, 1, 1]}
    assert any("every token carries loss" in note for note in lint_of(encoder, [all_labels], 100).notes())
    rows = [{"messages": TURNS[:2]}]
    assert lint_of(encoder, rows, 100).notes() == []
    endless = Encoder(encoder.tokenizer, [], encoder.vocab_size)  # the base's end is not the template's
    assert any("teaches the exits to stop" in note for note in lint_of(endless, rows, 100).notes())


def test_the_sample_shows_what_carries_loss_with_and_without_colours(encoder):
    row = encoder({"messages": TURNS})
    text = colored(encoder, row)
    assert "⟦So slow<|im_end|>⟧" in text.plain and "⟦now<|im_end|>⟧" in text.plain
    assert text.plain.replace("⟦", "").replace("⟧", "") == encoder.tokenizer.decode(row.token_ids)
    green = [text.plain[s.start : s.end] for s in text.spans if s.style == "green"]
    assert green == ["⟦So slow<|im_end|>⟧", "⟦now<|im_end|>⟧"]
    console = Console(record=True, width=200, force_terminal=True, color_system="truecolor", file=StringIO())
    show_row(console, encoder, row)
    assert "\x1b[32m⟦So slow" in console.export_text(styles=True)


@pytest.fixture(scope="module")
def model(tiny_model):
    return EarlyExitModel(tiny_model("llama", vocab_size=320), [ExitConfig(name="draft", layer=2, head="native")])


def test_the_bases_own_samples_are_told_from_another_authors(model):
    import torch

    torch.manual_seed(0)
    prompts = torch.randint(3, 320, (16, 4))
    own = model.base.generate(prompts, do_sample=True, max_new_tokens=40, top_k=0, pad_token_id=0)
    mask = [False] * 4 + [True] * 40
    found = surprise(model, [Encoded(row, mask) for row in own.tolist()])
    assert found.num_labels == 640 and not found.is_foreign and abs(found.excess) < 4 * found.error
    hot = model.base.generate(prompts, do_sample=True, temperature=4.0, max_new_tokens=40, top_k=0, pad_token_id=0)
    found = surprise(model, [Encoded(row, mask) for row in hot.tolist()])
    assert found.is_foreign and "sampled above temperature 1" in str(found)
    foreign = torch.cat([prompts, torch.randint(3, 320, (16, 40))], dim=1)
    found = surprise(model, [Encoded(row, mask) for row in foreign.tolist()])
    assert found.is_foreign and "NOT WHAT THE BASE WRITES" in str(found) and found.agreement < 0.2


def test_few_labels_prove_nothing():
    assert not Surprise(2, 0.5, 0.4, 0.3).is_foreign
    assert Surprise(2000, 0.5, 0.4, 0.03).is_foreign
    assert not Surprise(200_000, 0.5, 0.01, 0.001).is_foreign
