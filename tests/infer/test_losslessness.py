"""What is committed is what Hugging Face's greedy decoding gives, whatever the lower exits propose (DESIGN §7)."""

import pytest
import torch

from infer.params import SamplingParams
from infer.runner import Runner
from infer.strategy import Policy
from tests.infer.patterns import PATTERNS
from tests.tiny_engine import (
    IN_PLACE,
    PROMPTS,
    STRATEGIES,
    Script,
    Tiny,
    hf_greedy,
    make_model,
    make_trimmed_model,
    model_of,
    oracle,
    texts_of,
)
from tests.tiny_models import FAMILIES
from train.heads import ExitConfig

NUM_TOKENS = 14
ROWS = PROMPTS[:3]  # of 3, 9 and 17 tokens


def greedy(num_tokens: int = NUM_TOKENS, **fields: object) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=num_tokens, **fields)


# ---- honest exits ----


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_gives_hugging_faces_tokens(family, strategy):
    tiny = Tiny(model_of(family), strategy, Policy(num_draft_tokens=3, window=4, inner_rounds=2))
    prompts = PROMPTS[:4]
    got = [r.token_ids for r in tiny.generate(prompts, greedy(10))]
    assert got == [oracle(family, p, 10) for p in prompts]


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", range(1, 9))
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_and_batch_size_gives_hugging_faces_tokens(family, strategy, batch_size):
    tiny = Tiny(model_of(family), strategy, Policy(num_draft_tokens=2))
    prompts = PROMPTS[-batch_size:]
    assert [r.token_ids for r in tiny.generate(prompts, greedy())] == [oracle(family, p, NUM_TOKENS) for p in prompts]


@pytest.mark.parametrize("batch_size", range(1, 9))
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_batch_of_any_size_gives_what_each_row_gives_alone(strategy, batch_size):
    tiny = Tiny(model_of(), strategy)
    prompts = PROMPTS[:batch_size]
    assert [r.token_ids for r in tiny.generate(prompts, greedy(8))] == [oracle("llama", p, 14)[:8] for p in prompts]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_rows_may_join_and_leave_between_rounds(strategy):
    tiny = Tiny(model_of(), strategy, max_num_seqs=2)
    params = [greedy(n) for n in (1, 9, 2, 14, 3, 5, 1, 7)]
    got = [r.token_ids for r in tiny.generate(PROMPTS, params)]
    assert got == [oracle("llama", p, 14)[: q.max_tokens] for p, q in zip(PROMPTS, params, strict=True)]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_calls_stay_inside_the_bitwise_range(strategy, monkeypatch):
    """Programs that are wrong outside their range: one token alone, and more than the limit in decoding."""
    tiny = Tiny(model_of(), strategy, bitwise_range=(2, 12))
    call = Runner._call

    def checked(runner, program, x, query):
        assert 2 <= x.shape[0] * x.shape[1] <= 12, x.shape
        return call(runner, program, x, query)

    for name in ("_exits", "_unembeds"):
        for number, (program, limits, pages, takes) in enumerate(getattr(tiny.runner, name)):
            if not pages:
                getattr(tiny.runner, name)[number] = (wrong_outside(program, limits), limits, pages, takes)
    monkeypatch.setattr(Runner, "_call", checked)
    for batch in (ROWS[:1], ROWS):
        got = [r.token_ids for r in tiny.generate(batch, greedy())]
        assert got == [oracle("llama", p, NUM_TOKENS) for p in batch]


def wrong_outside(program, bitwise_range):
    low, high = bitwise_range
    return lambda x: program(x) if low <= len(x) <= high else torch.full_like(program(x), torch.nan)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_calls_split_at_the_bitwise_limit_give_the_same_tokens(strategy):
    tiny = Tiny(model_of(), strategy, Policy(num_draft_tokens=5, window=4), bitwise_range=(1, 4))
    assert [r.token_ids for r in tiny.generate(ROWS, greedy())] == [oracle("llama", p, NUM_TOKENS) for p in ROWS]


@pytest.mark.parametrize("strategy", IN_PLACE)
def test_logits_are_of_whole_rows_and_never_copied_together(strategy):
    tiny = Tiny(model_of(), strategy, Policy(num_draft_tokens=2, window=4), bitwise_range=(1, 6))
    given = set[int]()
    for tier, (program, *rest) in enumerate(tiny.runner._unembeds):

        def recorded(states, program=program):
            logits = program(states)
            given.add(logits.data_ptr())
            return logits

        tiny.runner._unembeds[tier] = (recorded, *rest)
    rule, seen = tiny.engine.round.rule, []
    judge = rule.judge
    rule.judge = lambda lines: seen.append(lines) or judge(lines)
    assert [r.token_ids for r in tiny.generate(ROWS, greedy())] == [oracle("llama", p, NUM_TOKENS) for p in ROWS]
    assert all(len(lines.logits) == sum(lines.counts) for lines in seen)
    assert all(lines.logits.data_ptr() in given for lines in seen if sum(lines.counts) <= 6)
    assert all(len(lines.rows) == 1 for lines in seen if sum(lines.counts) > 6)  # looked up: longer than a call


def exits(*layers: int, head: str = "native") -> list[ExitConfig]:
    context = 3 if head == "linear_layer" else 0
    return [ExitConfig(name=f"exit{n}", layer=layer, head=head, context=context) for n, layer in enumerate(layers)]


@pytest.mark.parametrize(
    ("layers", "head"),
    [((2,), "native"), ((3,), "layer"), ((1, 3), "linear"), ((1, 3), "layer"), ((1, 2, 4), "native")]
    + [((1, 2, 4), "layer"), ((1, 3), "linear_layer"), pytest.param((1, 2, 3, 5), "layer", marks=pytest.mark.slow)],
)
def test_any_number_of_exits_of_any_kind_gives_the_same_tokens(layers, head):
    model = make_model("llama", exits(*layers, head=head))
    want = [oracle("llama", p, NUM_TOKENS) for p in ROWS]
    for strategy in (s for s in STRATEGIES if not s.startswith("hispec") or len(layers) > 1):
        tiny = Tiny(model, strategy, Policy(num_draft_tokens=2, window=3, inner_rounds=2))
        assert [r.token_ids for r in tiny.generate(ROWS, greedy())] == want


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_ids_outside_a_trimmed_vocabulary_still_appear(strategy):
    vocab = torch.arange(0, 128, 3)
    model = make_trimmed_model(vocab)
    got = [r.token_ids for r in Tiny(model, strategy).generate(ROWS, greedy())]
    assert got == [oracle("llama", p, NUM_TOKENS) for p in ROWS]
    assert {i for ids in got for i in ids} - set(vocab.tolist())


def test_a_trimmed_exit_proposes_real_ids():
    """A draft exit that equals the target but for its vocabulary is accepted wherever the target stays within it."""
    everything = torch.arange(128)
    model = make_model(exits=[ExitConfig(name="draft", layer=5, head="native", vocab_size=127)])
    base = model.base
    with torch.no_grad():  # the last layer adds nothing
        for matrix in (base.model.layers[5].self_attn.o_proj, base.model.layers[5].mlp.down_proj):
            matrix.weight.zero_()
    never = (set(range(128)) - set(hf_greedy(model, ROWS[0], NUM_TOKENS))).pop()
    model.set_draft_vocab("draft", everything[everything != never])
    tiny = Tiny(model, "layerskip")
    (request,) = tiny.generate(ROWS[:1], greedy())
    assert request.token_ids == hf_greedy(model, ROWS[0], NUM_TOKENS)
    assert tiny.round.stats[1].num_accepted == tiny.round.stats[1].num_draft_tokens > 0


# ---- rigged exits ----

POLICIES = [(1, 1, 1), (1, 4, 3), (2, 4, 4), (2, 1, 2), (5, 7, 1), (5, 7, 3)]  # γ, N_i, R


def rigged(strategy, policy, is_right, wrong=(1, 2, 3), num_tokens=NUM_TOKENS, prompts=ROWS, **params):
    texts = texts_of("llama", prompts, NUM_TOKENS)
    tiny = Tiny(model_of(), strategy, Policy(num_draft_tokens=policy[0], window=policy[1], inner_rounds=policy[2]),
                rig=Script(texts, is_right, wrong))  # fmt: skip
    requests = tiny.generate(prompts, greedy(num_tokens, **params))
    return tiny, requests


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_hispec_commits_the_targets_tokens_under_any_pattern(pattern, policy):
    _, requests = rigged("hispec", policy, PATTERNS[pattern])
    assert [r.token_ids for r in requests] == [oracle("llama", p, NUM_TOKENS) for p in ROWS]


@pytest.mark.parametrize("gamma", [1, 2, 5])
@pytest.mark.parametrize("pattern", list(PATTERNS)[:6])
def test_layerskip_commits_the_targets_tokens_under_any_pattern(pattern, gamma):
    _, requests = rigged("layerskip", (gamma, 4, 4), PATTERNS[pattern])
    assert [r.token_ids for r in requests] == [oracle("llama", p, NUM_TOKENS) for p in ROWS]


def test_both_lower_exits_may_agree_on_a_wrong_token():
    tiny, requests = rigged("hispec", (2, 4, 4), PATTERNS["reject all"], wrong=(1, 1, 1))
    assert [r.token_ids for r in requests] == [oracle("llama", p, NUM_TOKENS) for p in ROWS]
    _, early, full = tiny.round.stats
    assert early.num_accepted == early.num_draft_tokens > 0
    assert full.num_accepted == 0 < full.num_draft_tokens


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_accept_all_accepts_all_at_every_judge(policy):
    tiny, _ = rigged("hispec", policy, PATTERNS["accept all"])
    for stats in tiny.round.stats[1:]:
        assert stats.num_accepted == stats.num_draft_tokens > 0


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_reject_all_accepts_nothing_at_any_judge(policy):
    tiny, _ = rigged("hispec", policy, PATTERNS["reject all"])
    for stats in tiny.round.stats[1:]:
        assert stats.num_accepted == 0 < stats.num_draft_tokens


@pytest.mark.parametrize(("pattern", "full_accepts"), [
    ("draft right, intermediate wrong", False),
    ("draft wrong, intermediate right", True),
])  # fmt: skip
def test_each_judge_counts_its_own_verdicts(pattern, full_accepts):
    tiny, _ = rigged("hispec", (2, 4, 4), PATTERNS[pattern])
    _, early, full = tiny.round.stats
    assert early.num_accepted == 0 < early.num_draft_tokens
    assert full.num_accepted == (full.num_draft_tokens if full_accepts else 0)
    assert full.num_draft_tokens > 0


@pytest.mark.parametrize("gamma", [1, 2, 5])
@pytest.mark.parametrize("k", [0, 1, 3])
def test_counts_are_those_of_a_drafter_that_errs_from_its_kth_token_on(gamma, k):
    """The rounds of one row, by hand: γ drafted while they fit, min(k, γ) accepted, one more from the target."""
    drafts = drafted = accepted = done = 0
    while done < NUM_TOKENS:
        num_drafted = min(gamma, NUM_TOKENS - done - 1)
        num_accepted = min(k, num_drafted)
        drafts, drafted, accepted = drafts + (num_drafted > 0), drafted + num_drafted, accepted + num_accepted
        done += num_accepted + 1
    tiny, requests = rigged("layerskip", (gamma, 4, 4), lambda row, tier, offset, number: offset < k)
    stats = tiny.round.stats[1]
    assert (stats.num_drafts, stats.num_draft_tokens, stats.num_accepted) == (3 * drafts, 3 * drafted, 3 * accepted)
    (metrics,) = requests[0].output().metrics.tiers
    assert (metrics.num_drafts, metrics.num_draft_tokens, metrics.num_accepted) == (drafts, drafted, accepted)


def test_the_first_drafted_token_is_judged_too():
    """A04: the check must not begin at the second one; γ = 1 has no second one."""
    for gamma in (1, 3):
        tiny, requests = rigged("layerskip", (gamma, 4, 4), lambda row, tier, offset, number: offset > 0)
        assert [r.token_ids for r in requests] == [oracle("llama", p, NUM_TOKENS) for p in ROWS]
        assert tiny.round.stats[1].num_accepted == 0


def test_rows_of_3_9_and_17_tokens_accept_0_1_and_all_in_turn():
    """A05: a row's cursors move by what it accepted itself."""
    tiny = Tiny(model_of(), "layerskip", Policy(num_draft_tokens=4),
                rig=Script(texts_of("llama", ROWS, NUM_TOKENS), PATTERNS["rotate 0, 1, γ"]))  # fmt: skip
    requests = [tiny.request(p, greedy()) for p in ROWS]
    for request in requests:
        tiny.engine.add(request)
    number = 0
    while tiny.engine.has_unfinished:
        before = [len(r.token_ids) for r in requests]
        tiny.engine.step()
        for b, request in enumerate(requests):
            left = NUM_TOKENS - before[b]
            if left > 0:
                gained = min((0, 1, 4)[(b + number) % 3], left - 1) + 1
                assert len(request.token_ids) == before[b] + gained
                assert request.row.num_committed == len(request.prompt_token_ids) + len(request.token_ids)
        number += 1
    assert [r.token_ids for r in requests] == [oracle("llama", p, NUM_TOKENS) for p in ROWS]


@pytest.mark.parametrize("policy", [(1, 1, 1), (4, 6, 2)], ids=str)
def test_each_row_has_its_own_positions_when_judges_accept_0_1_and_all_in_turn(policy):
    """A05 with two judges that err in different rows: after every round, all tiers stand before the row's own end."""

    def is_right(row, tier, offset, number):
        return offset < (0, 1, 99)[(row + number + tier) % 3]

    texts = texts_of("llama", ROWS, NUM_TOKENS)
    tiny = Tiny(model_of(), "hispec", Policy(num_draft_tokens=policy[0], window=policy[1], inner_rounds=policy[2]),
                rig=Script(texts, is_right))  # fmt: skip
    requests = [tiny.request(p, greedy()) for p in ROWS]
    for request in requests:
        tiny.engine.add(request)
    lengths = set()
    while tiny.engine.has_unfinished:
        tiny.engine.step()
        for request in requests:
            num_tokens = len(request.prompt_token_ids) + len(request.token_ids)
            assert [*request.prompt_token_ids, *request.token_ids] == texts[request.prompt_token_ids][:num_tokens]
            assert request.row.cursors == [num_tokens - 1] * 3
        lengths.add(len({len(r.token_ids) for r in requests}))
    assert max(lengths) == 3  # the rows really went at different paces


# ---- length limit and tiny temperatures ----


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_row_at_the_models_length_ends_there(strategy):
    """A18: the draft must not run past the last position."""
    prompt = tuple(range(2, 33))
    for length in (30, 31):
        tiny = Tiny(model_of(), strategy, Policy(num_draft_tokens=5), max_model_len=32)
        (request,) = tiny.generate([prompt[:length]], SamplingParams(temperature=0, max_tokens=None))
        assert request.token_ids == oracle("llama", prompt[:length], 32 - length)
        assert request.finish_reason == "length"


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("temperature", [1e-9, 1e-39, 1e-5, 1e-4])
def test_a_tiny_temperature_is_greedy_and_leaves_its_neighbour_alone(temperature, strategy):
    """A14."""
    tiny = Tiny(model_of(), strategy)
    params = [SamplingParams(temperature=temperature, max_tokens=8, seed=1), greedy(8)]
    got = [r.token_ids for r in tiny.generate(ROWS[:2], params)]
    assert got == [oracle("llama", p, NUM_TOKENS)[:8] for p in ROWS[:2]]
