"""Exits at every depth, against Hugging Face's own hidden states and against least squares on all tokens at once."""

import json
import random
import sys

import pytest
import torch
import yaml
from torch import nn

from infer.strategy import Policy
from tests.tiny_models import FAMILIES, NUM_LAYERS, VOCAB_SIZE
from train.base_model import load_base
from train.chat import Encoded
from train.cli import main
from train.costs import default_costs, measured_ratios
from train.depths import Scores, exits_everywhere, fit_heads, label_states, score
from train.figures import Figures
from train.heads import ExitConfig
from train.model import EarlyExitModel
from train.probe import choose_rows, worth, worth_of_pairs
from train.ridge import RIDGES, Moments, fit_linear

NUM_DEPTHS = NUM_LAYERS - 1


def make_rows(num_rows, seed=0, vocab_size=VOCAB_SIZE):
    """Rows of 12 tokens with three stretches of labels; the first token is marked too, but nothing predicts it."""
    draw = random.Random(seed)
    mask = [True, True, False, True, True, True, False, True, True, True, True, False]
    return [Encoded([draw.randrange(3, vocab_size) for _ in mask], mask) for _ in range(num_rows)]


LABELS = [1, 3, 4, 5, 7, 8, 9, 10]  # columns of labels in such a row
BREAKS = [True, True, False, False, True, False, False, False]


# ---- scores ----


def hf_laws(model, norm, rows):
    """Laws [L, N, V] of the base's norm and unembedding after 1 … L layers, from Hugging Face's own hidden states."""
    out = model(torch.tensor([row.token_ids for row in rows]), output_hidden_states=True)
    before = [column - 1 for column in LABELS]
    states = [norm(hidden) for hidden in out.hidden_states[1:-1]]
    logits = [model.lm_head(state) for state in states] + [out.logits]
    return torch.stack([own[:, before].flatten(0, 1) for own in logits]).double().softmax(dim=-1)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("draft_vocab", [None, torch.arange(0, VOCAB_SIZE, 3)])
def test_a_native_exit_scores_as_hugging_faces_hidden_states_say(tiny_model, family, draft_vocab):
    rows = make_rows(5)
    peer = tiny_model(family)
    decoder = peer.model.decoder if family.startswith("opt") else peer.model
    norm = (decoder.final_layer_norm or nn.Identity()) if family.startswith("opt") else decoder.norm
    project = getattr(decoder, "project_out", None) or nn.Identity()
    laws = hf_laws(peer, lambda hidden: project(norm(hidden)), rows)
    ids = torch.arange(VOCAB_SIZE) if draft_vocab is None else draft_vocab

    scores = score({"native": exits_everywhere(tiny_model(family), "native", draft_vocab)}, rows)

    target = laws[-1]  # [N, V]
    own = laws[:-1, :, ids]
    assert torch.equal(scores.target, target.argmax(dim=-1))
    assert torch.equal(scores.picks["native"], ids[own.argmax(dim=-1)])
    q = torch.zeros_like(laws[:-1])
    q[:, :, ids] = own / own.sum(dim=-1, keepdim=True)
    acceptance = 1 - 0.5 * (target - q).abs().sum(dim=-1).mean(dim=-1)
    torch.testing.assert_close(scores.acceptance["native"], acceptance, atol=1e-4, rtol=0)  # fp32 against fp64
    assert torch.equal(scores.breaks, torch.tensor(BREAKS * 5))


def test_an_untrained_linear_exit_is_the_native_one_and_chunks_do_not_show(tiny_model, monkeypatch):
    rows = make_rows(5)
    models = {kind: exits_everywhere(tiny_model("llama"), kind) for kind in ("native", "linear")}
    scores = score(models, rows)
    assert torch.equal(scores.picks["native"], scores.picks["linear"])
    monkeypatch.setattr("train.depths.CHUNK", 3)
    again = score(models, rows)
    assert torch.equal(again.picks["native"], scores.picks["native"]) and torch.equal(again.target, scores.target)
    torch.testing.assert_close(again.acceptance["linear"], scores.acceptance["linear"])


# ---- the closed form ----


@pytest.mark.parametrize("family", ["llama", "opt", "opt-350m-shape"])
def test_the_closed_form_is_least_squares_on_all_hidden_states_at_once(tiny_model, family):
    model, rows, tuning_rows = exits_everywhere(tiny_model(family), "linear"), make_rows(20), make_rows(5, seed=1)
    fits = fit_heads(model, rows, tuning_rows)
    states = [torch.cat(parts).double() for parts in zip(*(label_states(model, row) for row in rows + tuning_rows))]
    for exit_, fit, hidden in zip(model.exits, fits, states[:-1], strict=True):
        size = hidden.shape[1]
        damping = (fit.ridge * hidden.square().sum(dim=0).mean()).sqrt() * torch.eye(size, dtype=torch.float64)
        padded = torch.cat([states[-1] - hidden, torch.zeros(size, size, dtype=torch.float64)])
        expected = torch.linalg.lstsq(torch.cat([hidden, damping]), padded).solution.T
        torch.testing.assert_close(fit.weight, expected, atol=1e-6, rtol=1e-5)  # normal equations square the condition
        torch.testing.assert_close(model.heads[exit_.name].linear.weight, expected.float(), atol=1e-5, rtol=1e-4)


def test_sums_know_the_error_and_the_ridge_is_the_best_on_rows_that_were_not_fitted():
    torch.manual_seed(0)
    mix = torch.randn(8, 8, dtype=torch.float64)
    hidden, tuned = torch.randn(12, 8), torch.randn(40, 8)  # few and noisy: the smallest ridge is not the best
    final, tuned_final = (h.double() @ mix + 3 * torch.randn(len(h), 8) for h in (hidden, tuned))
    fitted, tuning = Moments([8], 8), Moments([8], 8)
    fitted.add(hidden[:5], final[:5] - hidden[:5])
    fitted.add(hidden[5:], final[5:] - hidden[5:])
    tuning.add(tuned, tuned_final - tuned)
    errors = {}
    for ridge in RIDGES:
        weight = fitted.weight(ridge)
        errors[ridge] = float((tuned_final - tuned - tuned.double() @ weight.T).square().sum())
        assert tuning.error(weight) == pytest.approx(errors[ridge])
    fit = fit_linear(fitted, tuning)
    best = min(errors, key=errors.__getitem__)
    assert fit.ridge == best != min(RIDGES)
    assert fit.unexplained == pytest.approx(errors[best] / float((tuned_final - tuned).square().sum()))


def test_states_that_are_not_finite_are_told(tiny_model):
    base = tiny_model("llama")
    base.model.layers[1].mlp.down_proj.weight.fill_(float("inf"))
    with pytest.raises(ValueError, match=r"not finite; set model\.dtype"):
        fit_heads(exits_everywhere(base, "linear"), make_rows(3), make_rows(2))


class Matrix(nn.Module):
    """A decoder layer that is linear in the hidden states."""

    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(nn.init.orthogonal_(torch.empty(size, size)), requires_grad=False)

    def forward(self, hidden, **_):
        return hidden @ self.weight.T


def test_a_depth_whose_states_are_a_linear_image_of_the_last_agrees_always(tiny_model):
    torch.manual_seed(0)
    base = tiny_model("llama")
    for n in (3, 4, 5):
        base.model.layers[n] = Matrix(base.config.hidden_size)
    models = {kind: exits_everywhere(base, kind) for kind in ("native", "linear")}
    fits = fit_heads(models["linear"], make_rows(30), make_rows(5, seed=1))
    scores = score(models, make_rows(10, seed=2))
    for n, fit in enumerate(fits):
        agreement = {kind: float((picks[n] == scores.target).float().mean()) for kind, picks in scores.picks.items()}
        acceptance = float(scores.acceptance["linear"][n])
        if n + 1 >= 3:
            assert agreement["linear"] == 1.0 and acceptance > 0.999 and fit.unexplained < 1e-6
            assert agreement["native"] < 0.5
        else:
            assert agreement["linear"] < 1.0 and fit.unexplained > 1e-3


# ---- rows ----


def test_rows_to_fit_to_tune_and_to_score_are_disjoint():
    training, held_out = make_rows(30), make_rows(10, seed=1)
    training += held_out[:4] + training[:5]  # copies of held-out rows, and rows that stand twice
    rows = choose_rows(training, held_out, num_tokens=100, seed=0)
    parts = [{tuple(row.token_ids) for row in part} for part in rows]
    assert sum(map(len, parts)) == len(set.union(*parts)) == sum(map(len, rows))
    num_fitted = sum(row.num_labels for row in rows.fit + rows.tuning)
    assert 100 <= num_fitted < 108 and len(rows.scored) == 10  # rows of 8 labels; fewer than 100 are held out
    assert parts[2] == {tuple(row.token_ids) for row in held_out}
    assert len(choose_rows(training, held_out, num_tokens=17, seed=0).scored) == 3
    assert choose_rows(training, held_out, 100, seed=1) != rows == choose_rows(training, held_out, 100, seed=0)


def test_too_few_rows_are_told():
    rows = make_rows(5)
    with pytest.raises(ValueError, match=r"--num_tokens=100 takes 0 of 5 training rows \(0 of them not held out"):
        choose_rows(rows, rows, 100, seed=0)
    with pytest.raises(ValueError, match="takes 1 of 5"):
        choose_rows(rows, make_rows(2, seed=1), 1, seed=0)


# ---- what exits are worth ----


def test_worth_is_the_figures_of_validation():
    torch.manual_seed(0)
    target = torch.randint(2, (60,))
    picks = torch.where(torch.rand(3, 60) < 0.7, target, 1 - target)
    breaks = torch.zeros(60, dtype=torch.bool)
    breaks[[0, 25]] = True
    scores = Scores(target, breaks, {"linear": picks}, {"linear": torch.tensor([0.1, 0.2, 0.3])})
    costs = [0.1, 0.2, 0.5]
    exits = worth(scores, "linear", costs, 1.1, num_draft_tokens=3)
    pairs = worth_of_pairs(scores, costs, 1.1, Policy())
    assert [(pair.draft, pair.intermediate) for pair in pairs] == [(1, 2), (1, 3), (2, 3)]
    for pair in pairs:
        low, high = pair.draft - 1, pair.intermediate - 1
        figures = Figures(["a", "b"], {"a": costs[low], "b": costs[high], "target": 1.1}, 3)
        figures.update({}, {"a": picks[low], "b": picks[high], "target": target}, breaks)
        named = figures.named()
        assert pair.speedup == named["hispec_speedup"]
        for name, exit_ in (("a", exits[low]), ("b", exits[high])):
            assert exit_.speedup == named[f"{name}/speedup"]
            assert exit_.agreement == named[f"{name}/agreement"]
            assert exit_.acceptance_length == named[f"{name}/acceptance_length"]
    assert [exit_.acceptance for exit_ in exits] == pytest.approx([0.1, 0.2, 0.3])


def test_costs_between_measured_depths_are_interpolated_and_beyond_them_follow_the_nearest():
    assert measured_ratios({}, 3).tolist() == [1, 1, 1]
    assert measured_ratios({2: 1.5}, 3).tolist() == [1.5, 1.5, 1.5]
    assert measured_ratios({4: 2.0, 2: 1.0}, 5).tolist() == [1.0, 1.0, 1.5, 2.0, 2.0]


# ---- the command ----


@pytest.fixture
def config(base_folder, tmp_path):
    def write(name, rows):
        lines = [{"token_ids": row.token_ids, "loss_mask": list(map(int, row.loss_mask))} for row in rows]
        path = tmp_path / name
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return str(path)

    content = {
        "model": {
            "base": str(base_folder),
            "exits": [{"name": "draft", "layer": 2, "head": "layer"}, {"name": "mid", "layer": 4, "head": "layer"}],
            "num_draft_tokens": 3,
        },
        "data": {
            "train_files": write("train.jsonl", make_rows(40, vocab_size=320)),
            "val_files": write("val.jsonl", make_rows(6, seed=1, vocab_size=320)),
        },
        "trainer": {"accelerator": "cpu", "logger": False, "default_root_dir": str(tmp_path / "run")},
    }
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def probe(config, tmp_path, *flags):
    """The JSON of a run that went well."""
    path = tmp_path / "probe.json"
    assert main(["probe", "--config", str(config), "--json", str(path), *flags]) == 0
    return json.loads(path.read_text())


def test_the_command_prints_the_table_writes_all_figures_and_trains_nothing(config, tmp_path, capsys):
    (tmp_path / "probe.json").write_text("old")
    found = probe(config, tmp_path, "--num_tokens", "216")
    out = capsys.readouterr().out
    assert "native" in out and "linear" in out and "A guide, not a forecast" in out
    assert "note: 216 labels are few for heads of 48 × 48" in out
    assert found["num_labels"] == {"fit": 168, "tuning": 48, "scored": 48} and found["vocab_size"] == 320
    assert [e["depth"] for e in found["linear"]] == [e["depth"] for e in found["native"]] == list(range(1, NUM_LAYERS))
    assert len(found["pairs"]) == NUM_DEPTHS * (NUM_DEPTHS - 1) // 2
    best, pair = found["best"]["linear"], found["best"]["pair"]
    assert best["speedup"] == max(e["speedup"] for e in found["linear"])
    assert pair == max(found["pairs"], key=lambda p: p["speedup"])
    assert f"One exit: depth {best['depth']}, predicted {best['speedup']:.2f}" in out
    assert f"draft at {pair['draft']}, intermediate at {pair['intermediate']}, predicted {pair['speedup']:.2f}" in out
    for exit_ in found["linear"]:
        assert f"{exit_['cost']:.3f}" in out and f"{exit_['agreement']:.1%}" in out
    assert not (tmp_path / "run").exists() and not list(tmp_path.glob(".probe*"))
    assert probe(config, tmp_path, "--num_tokens", "216") == found


def test_exits_propose_what_the_configs_largest_would(config, tmp_path):
    exits = '[{"name": "a", "layer": 1, "vocab_size": 50}, {"name": "b", "layer": 2, "vocab_size": %s}]'
    assert probe(config, tmp_path, "--model.exits", exits % 60)["vocab_size"] == 60
    assert probe(config, tmp_path, "--model.exits", exits % "null")["vocab_size"] == 320


def test_measured_costs_hold_at_their_depths(config, tmp_path, tiny_model):
    def costs(*flags):
        found = probe(config, tmp_path, "--num_tokens", "70", *flags)
        return [exit_["cost"] for exit_ in found["linear"]], found["target_cost"]

    default, target_cost = costs()
    base = tiny_model("llama", vocab_size=320)
    linear = default_costs(exits_everywhere(base, "linear"))
    assert default == [linear[f"depth_{depth}"] for depth in range(1, NUM_LAYERS)] and target_cost == 1
    configured = default_costs(EarlyExitModel(base, [ExitConfig(name="draft", layer=2, head="layer")]))["draft"]
    given, target_cost = costs("--model.costs", json.dumps({"draft": 3 * configured, "target": 1.2}))
    assert given == pytest.approx([3 * cost for cost in default]) and target_cost == 1.2
    flags = ["--model.costs", '{"draft": 0.4, "target": 1.2}', "--costs", "{1: 0.11, 2: 0.2, 5: 0.9, target: 1.1}"]
    given, target_cost = costs(*flags)
    assert [given[0], given[1], given[4]] == pytest.approx([0.11, 0.2, 0.9]) and target_cost == 1.1
    assert given[1] < given[2] < given[3] < given[4]


def test_exits_of_a_warm_start_are_scored_on_the_same_labels(config, base_folder, tmp_path, capsys):
    """A `linear` head with W = 0 picks as the native one at its depth: all figures but the price must be the same."""
    exits = [{"name": "low", "layer": 2, "head": "linear"}, {"name": "high", "layer": 4, "head": "linear"}]
    model = EarlyExitModel(load_base(str(base_folder), None, "float32"), [ExitConfig(**e) for e in exits])
    model.save_heads(tmp_path / "heads")
    flags = ["--num_tokens", "216", "--model.exits", json.dumps(exits)]
    assert probe(config, tmp_path, *flags)["trained"] == []
    found = probe(config, tmp_path, *flags, "--model.warm_start", str(tmp_path / "heads"))
    out = capsys.readouterr().out
    assert [(e["name"], e["depth"], e["head"]) for e in found["trained"]] == [
        ("low", 2, "linear"),
        ("high", 4, "linear"),
    ]
    for exit_ in found["trained"]:
        native, linear = (found[kind][exit_["depth"] - 1] for kind in ("native", "linear"))
        assert exit_["agreement"] == native["agreement"] and exit_["cost"] == linear["cost"]
        assert exit_["acceptance_length"] == native["acceptance_length"]
        assert f"Trained {exit_['name']} (linear at depth {exit_['depth']}, cost {exit_['cost']:.3f}): agreement" in out


@pytest.mark.parametrize(("suffix", "begin"), [("png", b"\x89PNG"), ("svg", b"<?xml")])
def test_the_drawing_is_a_picture(config, tmp_path, suffix, begin):
    pytest.importorskip("matplotlib")
    path = tmp_path / f"probe.{suffix}"
    assert main(["probe", "--config", str(config), "--num_tokens", "70", "--plot", str(path)]) == 0
    assert path.read_bytes().startswith(begin)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--num_tokens", "0"], ["--num_tokens=0"]),
        (["--num_tokens", "many"], ["num_tokens", "many"]),
        (["--num_tokens"], ["--num_tokens", "expected one argument"]),
        (["--costs", "0.5"], ["--costs", "mapping of depths"]),
        (["--costs", "{6: 0.5}"], ["--costs", "'6'", "1, 2, 3, 4, 5, target"]),
        (["--costs", "{2: .inf}"], ["--costs.2=inf", "greater than 0"]),
        (["--costs", "{2: 0}"], ["--costs.2=0", "greater than 0"]),
        (["--json", "nowhere/probe.json"], ["--json nowhere/probe.json", "folder that exists"]),
        (["--plot", "nowhere/probe.png"], ["--plot nowhere/probe.png", "folder that exists"]),
        (["--plot", "probe.gif"], ["--plot probe.gif", ".png or .svg"]),
        (["--num_token", "5"], ["num_token"]),
        (["--data.max_lenght", "9"], ["Did you mean data.max_length"]),
    ],
)
def test_a_mistake_is_one_line_that_names_it(config, capsys, flags, words):
    assert main(["probe", "--config", str(config), *flags]) == 2
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert line.startswith("error: ") and all(word in line for word in words), line


def test_a_drawing_without_matplotlib_is_refused_before_any_work(config, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["probe", "--config", str(config), "--plot", str(tmp_path / "probe.png")]) == 2
    told = capsys.readouterr()
    assert "pip install 'hispec[plot]'" in told.err and not told.out
