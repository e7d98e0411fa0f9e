"""Any mixture of rules, ways to sample, policies and drafts gives the tokens of plain decoding and the oracle's."""

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from infer.params import SamplingParams
from tests.infer.rules_oracle import EOS, ids_of, oracle, policy_of, soft_model, trimmed_model
from tests.tiny_engine import STRATEGIES, Script, Tiny

ids = st.integers(0, 127)
numbers = st.fixed_dictionaries(
    {"max_tokens": st.integers(6, 10)},
    optional={
        "presence_penalty": st.sampled_from([-2, -0.5, 1.5]),
        "frequency_penalty": st.sampled_from([-1.0, 0.3, 2]),
        "repetition_penalty": st.sampled_from([0.6, 1.2, 3.0]),
        "logit_bias": st.dictionaries(ids, st.floats(-20, 20), max_size=5),
        "allowed_token_ids": st.lists(ids, min_size=1, max_size=40),
        "bad_words": st.lists(
            st.lists(st.integers(0, 20), min_size=1, max_size=3).map(lambda x: " ".join(map(str, x)))
        ),
        "min_tokens": st.integers(0, 6),
        "stop_token_ids": st.lists(ids, max_size=10),
    },
)
ways = st.one_of(
    st.just({"temperature": 0}),
    st.fixed_dictionaries(
        {"temperature": st.floats(0.3, 2), "seed": st.integers(0, 2**63)},
        optional={
            "min_p": st.sampled_from([0.01, 0.2, 1.0]),
            "top_k": st.sampled_from([1, 5, 30]),
            "top_p": st.sampled_from([0.4, 0.9]),
        },
    ),
)
row_params = st.builds(lambda a, b: SamplingParams(**a, **b), numbers, ways)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@given(
    rows=st.lists(st.tuples(st.lists(st.integers(0, 20), min_size=1, max_size=9), row_params), min_size=1, max_size=4),
    strategy=st.sampled_from(STRATEGIES[1:]),
    policy=st.tuples(st.integers(1, 5), st.integers(1, 6), st.integers(1, 3)).map(policy_of),
    is_trimmed=st.booleans(),
    rig_seed=st.none() | st.integers(0, 2**32),
)
def test_any_mixture_gives_plain_decodings_tokens_and_the_oracles(rows, strategy, policy, is_trimmed, rig_seed):
    model = trimmed_model() if is_trimmed else soft_model()
    plain = Tiny(model, "autoregressive")
    want = [plain.generate([prompt], params, EOS)[0] for prompt, params in rows]
    rig = None
    if rig_seed is not None and not is_trimmed:
        texts = {tuple(p): [*p, *r.token_ids] for (p, _), r in zip(rows, want)}
        rig = Script(texts, lambda *where: hash((rig_seed, *where)) % 4 > 0)
    tiny = Tiny(model, strategy, policy, rig=rig)
    got = tiny.generate([p for p, _ in rows], [params for _, params in rows], EOS)
    assert ids_of(got) == ids_of(want)
    assert [r.stop_reason for r in got] == [r.stop_reason for r in want]
    for (prompt, params), request in zip(rows, got):
        if request.finish_reason != "error":
            assert request.token_ids == oracle(tuple(prompt), params)
