"""Where a text ends while drafts are accepted in blocks: EOS, stop tokens, stop strings, max_tokens (A01–A03, A08)."""

import pytest

from infer.params import SamplingParams
from infer.strategy import Policy
from tests.infer.patterns import PATTERNS
from tests.tiny_engine import PROMPTS, Script, Tiny, model_of, oracle, texts_of

NUM_TOKENS = 14
ROWS = PROMPTS[:3]  # of 3, 9 and 17 tokens
ALL_RIGHT = PATTERNS["accept all"]
SPECULATING = [("layerskip", (5, 1, 1)), ("hispec", (5, 7, 3)), ("hispec", (1, 7, 4)), ("hispec", (8, 8, 4))]


def greedy(num_tokens: int = NUM_TOKENS, **fields: object) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=num_tokens, **fields)


def scripted(strategy, policy, is_right, wrong=(1, 2, 3)):
    numbers = Policy(num_draft_tokens=policy[0], window=policy[1], inner_rounds=policy[2])
    return Tiny(model_of(), strategy, numbers, rig=Script(texts_of("llama", ROWS, NUM_TOKENS), is_right, wrong))


@pytest.mark.parametrize(("strategy", "policy"), SPECULATING)
@pytest.mark.parametrize("i", range(1, 7))
def test_nothing_follows_an_eos_inside_an_accepted_window(i, strategy, policy):
    """A01: the i-th token of the known answer is declared EOS; every draft is accepted."""
    text = oracle("llama", PROMPTS[0], NUM_TOKENS)
    eos = text[i - 1]
    want = text[: text.index(eos) + 1]
    (request,) = scripted(strategy, policy, ALL_RIGHT).generate([PROMPTS[0]], greedy(), eos=[eos])
    assert request.token_ids == want
    assert request.finish_reason == "stop"
    assert request.stop_reason is None
    assert request.text == "".join(f"<{t}>" for t in want[:-1])  # as in vLLM, the text leaves the stop token out
    assert Tiny(model_of(), "autoregressive").generate([PROMPTS[0]], greedy(), eos=[eos])[0].token_ids == want


def test_an_eos_that_only_the_intermediate_exit_wants_does_not_end_the_text():
    text = oracle("llama", PROMPTS[0], NUM_TOKENS)
    eos = (text[2] + 2) % 128
    assert eos not in text
    tiny = scripted("hispec", (2, 4, 4), PATTERNS["reject all"], (2, 2, 2))
    (request,) = tiny.generate([PROMPTS[0]], greedy(), eos=[eos])
    assert request.token_ids == text
    assert request.finish_reason == "length"


def test_ignore_eos_goes_on_and_stop_token_ids_name_their_reason():
    text = oracle("llama", PROMPTS[0], NUM_TOKENS)
    tiny = Tiny(model_of(), "hispec")
    assert tiny.generate([PROMPTS[0]], greedy(ignore_eos=True), eos=[text[3]])[0].token_ids == text
    (request,) = tiny.generate([PROMPTS[0]], greedy(stop_token_ids=[text[4]]))
    assert request.token_ids == text[: text.index(text[4]) + 1]
    assert (request.finish_reason, request.stop_reason) == ("stop", text[4])


@pytest.mark.parametrize("strategy", ["layerskip", "hispec"])
@pytest.mark.parametrize("gamma", [1, 2, 5])
def test_max_tokens_is_exact_when_all_drafts_are_accepted(gamma, strategy):
    """A02."""
    for num_tokens in sorted({1, 2, 3, gamma, gamma + 1, gamma + 2}):
        requests = scripted(strategy, (gamma, 4, 4), ALL_RIGHT).generate(ROWS, greedy(num_tokens))
        assert [r.token_ids for r in requests] == [oracle("llama", p, NUM_TOKENS)[:num_tokens] for p in ROWS]
        assert {r.finish_reason for r in requests} == {"length"}


@pytest.mark.parametrize(("strategy", "policy"), SPECULATING)
def test_a_stop_string_over_two_accepted_tokens_cuts_the_text(strategy, policy):
    """A03."""
    text = oracle("llama", PROMPTS[1], NUM_TOKENS)
    stop = f"{text[2]}><{text[3]}"
    (request,) = scripted(strategy, policy, ALL_RIGHT).generate(ROWS[1:2], greedy(stop=[stop, "never"]))
    assert request.token_ids == text[:4]
    assert request.text == f"<{text[0]}><{text[1]}><"
    assert (request.finish_reason, request.stop_reason) == ("stop", stop)


# ---- ends of all kinds in one batch, under any pattern ----

CASES = [("autoregressive", (1, 1, 1)), ("layerskip", (5, 1, 1)), ("hispec", (2, 4, 4)), ("hispec", (5, 7, 3))]


def ends_at(kind: str, text: list[int], i: int) -> tuple[SamplingParams, list[int], int]:
    """Parameters and EOS that end `text` at its i-th token by what `kind` says, and after how many tokens it ends."""
    token_id = text[i - 1]
    first = text.index(token_id) + 1
    if kind == "eos":
        return greedy(), [token_id], first
    if kind == "stop token":
        return greedy(stop_token_ids=[127, token_id] if token_id != 127 else [token_id]), [], first
    if kind == "stop string":
        return greedy(stop=[f"<{token_id}>", "never"]), [], first
    if kind == "max_tokens":
        return greedy(i), [], i
    assert kind == "min_tokens"  # EOS stands at the i-th token, and a stop string two tokens later
    return greedy(min_tokens=i, stop=[f"<{text[i + 1]}>"]), [], text.index(text[i + 1], i) + 1


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize(("strategy", "policy"), CASES)
def test_rows_end_by_themselves_at_the_token_that_ends_them(strategy, policy, pattern):
    """A01, A02, A03, A08: nothing behind the end is shown in any round, and neighbours go on."""
    tiny = scripted(strategy, policy, PATTERNS[pattern])
    kinds = ("eos", "stop token", "stop string", "max_tokens", "min_tokens")
    expected = []
    for number, (kind, i) in enumerate((kind, i) for kind in kinds for i in (1, 3, 6)):
        prompt = ROWS[number % 3]
        text = oracle("llama", prompt, NUM_TOKENS)
        params, eos, length = ends_at(kind, text, i)
        request = tiny.request(prompt, params, eos)
        tiny.engine.add(request)
        shown = text[:length] if kind == "max_tokens" else text[: length - 1]
        expected.append((request, text[:length], "".join(f"<{t}>" for t in shown)))
    while tiny.engine.has_unfinished:
        tiny.engine.step()
        for request, token_ids, text in expected:
            seen = request.output().outputs[0]
            assert list(seen.token_ids) == token_ids[: len(seen.token_ids)]
            assert text.startswith(seen.text)
    for request, token_ids, text in expected:
        done = request.output().outputs[0]
        assert (list(done.token_ids), done.text) == (token_ids, text)
        assert done.finish_reason == ("length" if len(token_ids) == request.params.max_tokens else "stop")
    assert tiny.engine.pool.num_free == tiny.engine.pool.num_blocks - 1
