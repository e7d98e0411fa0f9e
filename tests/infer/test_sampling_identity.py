"""A seeded request gives the same tokens whatever drafted them, and plain sampling follows the exact law (§7)."""

import itertools
import random

import pytest
import torch
from scipy.stats import chi2

from infer.params import SamplingParams
from infer.sampler import PickParams, probabilities
from infer.strategy import Policy
from tests.tiny_engine import DEVICE, PROMPTS, STRATEGIES, Tiny, make_model, model_of
from train.heads import ExitConfig

ROWS = PROMPTS[:4]
SETTINGS = {
    "top_p": {"temperature": 0.8, "top_p": 0.95},
    "top_k": {"temperature": 1.0, "top_k": 20},
    "pure": {"temperature": 1.0},
    "hot": {"temperature": 3.0, "top_k": 50, "top_p": 0.9},
}


def params(name: str, seed: int, num_tokens: int = 10) -> SamplingParams:
    return SamplingParams(seed=seed, max_tokens=num_tokens, **SETTINGS[name])


_plain: dict = {}


def plain(name: str) -> list[list[int]]:
    """Each row alone, by plain decoding: the reference."""
    if name not in _plain:
        tiny = Tiny(model_of(), "autoregressive")
        _plain[name] = [tiny.generate([p], params(name, b))[0].token_ids for b, p in enumerate(ROWS)]
    return _plain[name]


@pytest.mark.parametrize(
    ("strategy", "policy"),
    [("autoregressive", (1, 1, 1)), ("layerskip", (1, 4, 4)), ("layerskip", (5, 4, 4))]
    + [("hispec", p) for p in [(1, 1, 1), (2, 4, 4), (5, 7, 3)]],
)
@pytest.mark.parametrize("name", SETTINGS)
def test_a_seeded_row_gives_the_tokens_of_plain_decoding(name, strategy, policy):
    tiny = Tiny(model_of(), strategy, Policy(num_draft_tokens=policy[0], window=policy[1], inner_rounds=policy[2]))
    got = tiny.generate(ROWS, [params(name, b) for b in range(len(ROWS))])
    assert [r.token_ids for r in got] == plain(name)


def test_sampled_drafts_are_accepted_at_all():
    """Else the identity above would be that of a strategy that never speculates."""
    tiny = Tiny(model_of(), "hispec")
    tiny.generate(ROWS, [params("hot", b, 20) for b in range(len(ROWS))])
    assert all(stats.num_accepted > 0 for stats in tiny.round.stats[1:])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_neither_neighbours_nor_the_place_in_the_batch_change_a_row(strategy):
    tiny = Tiny(model_of(), strategy)
    order = list(range(len(ROWS)))
    random.Random(1).shuffle(order)
    others = [SamplingParams(temperature=0, max_tokens=4), SamplingParams(temperature=2.0, seed=99, max_tokens=13)]
    prompts = [PROMPTS[5], *(ROWS[b] for b in order), PROMPTS[6]]
    got = tiny.generate(prompts, [others[0], *(params("top_p", b) for b in order), others[1]])
    assert [r.token_ids for r in got[1:-1]] == [plain("top_p")[b] for b in order]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_rows_of_one_prompt_differ_by_their_seed_only(strategy):
    """A11: seeds 1, none, 1, 2; a request without a seed draws its own and disturbs nobody."""
    tiny = Tiny(model_of(), strategy)
    each = [SamplingParams(temperature=0.8, max_tokens=10, seed=s) for s in (1, None, 1, 2, None)]
    rows = [r.token_ids for r in tiny.generate([ROWS[0]] * 5, each)]
    assert rows[0] == rows[2] == Tiny(model_of(), "autoregressive").generate([ROWS[0]], each[0])[0].token_ids
    assert len({tuple(row) for row in rows}) == 4
    assert all(len(set(row)) > 1 for row in rows)


def test_greedy_and_sampled_rows_share_a_batch():
    tiny = Tiny(model_of(), "hispec")
    greedy = SamplingParams(temperature=0, max_tokens=10)
    got = tiny.generate(ROWS, [greedy, params("pure", 1), greedy, params("pure", 3)])
    alone = [Tiny(model_of(), "autoregressive").generate([p], greedy)[0].token_ids for p in ROWS]
    assert [r.token_ids for r in got] == [alone[0], plain("pure")[1], alone[2], plain("pure")[3]]


# ---- the law ----

VOCAB = 4
NUM_SAMPLES = 2000


def exact_law(model, prompt: list[int], how: SamplingParams, num_tokens: int) -> dict[tuple[int, ...], float]:
    """Probability of every continuation of `num_tokens` tokens, from Hugging Face's logits."""
    law: dict[tuple[int, ...], float] = {(): 1.0}
    model.base.config._attn_implementation = "eager"
    for _ in range(num_tokens):
        longer = {}
        for text, p in law.items():
            with torch.no_grad():
                logits = model.base(torch.tensor([[*prompt, *text]], device=DEVICE), use_cache=False).logits[:, -1]
            for token, q in enumerate(probabilities(logits, PickParams.of([how], [0], [0], DEVICE))[0].tolist()):
                longer[(*text, token)] = p * q
        law = longer
    return law


@pytest.mark.parametrize("strategy", ["autoregressive", pytest.param("hispec", marks=pytest.mark.slow)])
@pytest.mark.parametrize("setting", [{"temperature": 1.5}, {"temperature": 2.0, "top_p": 0.8}, {"top_k": 2}], ids=str)
def test_sampled_texts_follow_the_exact_law(setting, strategy):
    """χ² over all texts of two tokens, α = 0.001; the seeds are fixed, so it passes always or never."""
    exits = [ExitConfig(name="draft", layer=2, head="native"), ExitConfig(name="intermediate", layer=4, head="native")]
    model = make_model("llama", exits, vocab_size=VOCAB, pad_token_id=0)
    how = [SamplingParams(seed=s, max_tokens=2, **setting) for s in range(NUM_SAMPLES)]
    law = exact_law(model, [1], how[0], 2)
    tiny = Tiny(model, strategy, num_blocks=202, max_num_seqs=100)
    counts = dict.fromkeys(itertools.product(range(VOCAB), repeat=2), 0)
    for request in tiny.generate([[1]] * NUM_SAMPLES, how):
        counts[tuple(request.token_ids)] += 1
    assert all(counts[text] == 0 for text, p in law.items() if p == 0)
    possible = {text: p * NUM_SAMPLES for text, p in law.items() if p > 0}
    assert min(possible.values()) > 5
    statistic = sum((counts[text] - expected) ** 2 / expected for text, expected in possible.items())
    assert statistic < chi2.ppf(0.999, len(possible) - 1)
