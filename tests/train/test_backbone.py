"""Training the base: what gets gradients, what a checkpoint holds, what is refused."""

import copy
import json

import pytest
import torch
from lightning.pytorch import Trainer

from tests.train.conftest import save_base
from train.backbone import Lora, without_adapters
from train.base_pass import Asked
from train.batches import collate, collate_packed
from train.chat import Encoded
from train.data import DistillationDataModule
from train.heads import ExitConfig
from train.labels import losses_of
from train.layerskip import LayerSkip
from train.linear_loss import text_loss
from train.losses import ExitLoss
from train.module import EarlyExitModule

NATIVE = ExitConfig(name="a", layer=1, head="native")
LAYER = ExitConfig(name="b", layer=3, head="layer", vocab_size=64, context=2)
LINEAR = ExitConfig(name="c", layer=4, head="linear")
ROWS = [Encoded([1, 5, 6, 7, 8, 9], [False, False] + [True] * 4), Encoded([1, 9, 4, 3], [False] * 2 + [True] * 2)]


@pytest.fixture
def data(base_folder, tmp_path):
    file = tmp_path / "rows.jsonl"
    rows = [{"prompt": f"The {n}", "response": "snow is so slow " + "now " * (n % 4)} for n in range(8)]
    file.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return DistillationDataModule(str(file), str(file), base=str(base_folder), batch_size=4)


def trainer(root, **options):
    silent = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "accelerator": "cpu"}
    return Trainer(default_root_dir=root, **(silent | {"max_epochs": 1} | options))


def make(base, exits=(NATIVE, LAYER, LINEAR), **options):
    torch.manual_seed(0)
    module = EarlyExitModule(str(base), list(exits), closed_form_labels=0, **options)
    module.model.draft_vocabs |= {e.name: torch.arange(64) for e in exits if e.vocab_size}
    return module


def weights_of(base):
    """Of the base itself, whatever has been put around its layers."""
    return {n.replace(".base_layer", ""): p.clone() for n, p in base.named_parameters() if "lora_" not in n}


def exit_grads(module, only):
    """Backward of the losses of exits `only`, or of the text at the target: gradients of the backbone, by name."""
    module.zero_grad()
    num_layers = module.model.family.num_layers
    labels = module.labels(collate(ROWS), asked=Asked([num_layers], torch.zeros(0, 0)))
    if only == "text":
        loss = text_loss(labels.depths[num_layers], labels.ids, module.model.unembed)
    else:
        loss = losses_of(module.model, labels)[only].total
    if not loss.requires_grad:
        return set()
    loss.backward()
    return {n for n, p in module.model.base.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0}


def layers_of(names):
    return {int(n.split("layers.")[1].split(".")[0]) for n in names if "layers." in n}


def test_with_lora_exits_train_the_adapters_below_them_and_the_text_trains_all(base_folder):
    module = make(base_folder, backbone="lora", lora=Lora(r=2))
    for adapters in module.model.backbone.values():
        torch.nn.init.normal_(adapters["B"]["default"].weight)  # at 0, A gets no gradient
    torch.nn.init.normal_(module.model.heads["b"].entry.context_linear.weight)  # at 0, it would read nothing
    found = {only: exit_grads(module, only) for only in ("a", "b", "c", "text")}
    assert all("lora_" in name for names in found.values() for name in names)
    # b reads the target's states too, as its context: the target must not be pulled towards it
    assert {only: layers_of(names) for only, names in found.items()} == {
        "a": {0},
        "b": {0, 1, 2},
        "c": {0, 1, 2, 3},
        "text": {0, 1, 2, 3, 4, 5},
    }
    assert {n.split(".")[-4] for n in found["text"]} == {
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"
    }  # fmt: skip


def test_with_full_the_text_trains_everything_and_native_exits_only_show_their_loss(base_folder):
    module = make(base_folder, backbone="full")
    everything = {name for name, _ in module.model.base.named_parameters()}
    assert exit_grads(module, "text") == everything
    assert exit_grads(module, "a") == set()
    trained = exit_grads(module, "c")
    assert layers_of(trained) == {0, 1, 2, 3}
    assert "lm_head.weight" not in trained and "model.norm.weight" not in trained


@pytest.mark.parametrize("backbone", ["frozen", "lora", "full"])
def test_a_step_moves_what_the_mode_trains_and_nothing_else(base_folder, data, tmp_path, backbone):
    module = make(base_folder, backbone=backbone, warmup_steps=0)
    before, state = weights_of(module.model.base), copy.deepcopy(module.state_dict())
    run = trainer(tmp_path, max_steps=2, limit_val_batches=0)
    run.fit(module, datamodule=data)
    after = weights_of(module.model.base)
    moved = {name for name, weight in before.items() if not torch.equal(weight, after[name])}
    assert moved == (set(before) if backbone == "full" else set())
    for name, weight in module.state_dict().items():
        assert torch.equal(weight, state[name]) is False, name
    rates = {group["initial_lr"] for group in run.optimizers[0].param_groups}
    assert rates == {1e-3} | {"frozen": set(), "lora": {2e-4}, "full": {3e-5}}[backbone]


def test_text_loss_is_cross_entropy_with_its_gradients_whatever_the_chunk():
    torch.manual_seed(0)
    states, labels = torch.randn(7, 5, dtype=torch.float64), torch.randint(11, (7,))
    grads = []
    for chunk in (3, 100, None):
        own, weight = states.clone().requires_grad_(), torch.linspace(-1, 1, 55).double().view(11, 5).requires_grad_()
        if chunk is None:
            loss = torch.nn.functional.cross_entropy(own @ weight.T, labels, reduction="sum")
        else:
            loss = text_loss(own, labels, lambda part, weight=weight: part @ weight.T, chunk)
        grads.append([loss, *torch.autograd.grad(2 * loss, [own, weight])])
    for other in grads[:2]:
        torch.testing.assert_close(other, grads[2], atol=1e-12, rtol=0)


@pytest.mark.parametrize("backbone", ["lora", "full"])
def test_every_parameter_gets_a_gradient_even_from_rows_without_labels(base_folder, backbone):
    """B16, and a layer that all rows skip."""
    module = make(base_folder, backbone=backbone)
    num_layers = module.model.family.num_layers
    asked = Asked([num_layers], torch.ones(num_layers, 1, dtype=torch.bool))
    labels = module.labels(collate([Encoded([5, 6, 7], [False] * 3)]), asked=asked)
    loss = text_loss(labels.depths[num_layers], labels.ids, module.model.unembed)
    (loss + sum(own.total for own in losses_of(module.model, labels).values())).backward()
    assert [n for n, p in module.model.trained().items() if p.grad is None] == []


def test_a_row_that_skips_a_layer_has_the_states_from_before_it(base_folder):
    model = make(base_folder, backbone="full").model.eval()
    batch = collate_packed([ROWS, ROWS])
    dropped = torch.zeros(6, 2, dtype=torch.bool)
    dropped[3, 1] = True
    some = model.base_pass(batch.token_ids, batch.positions, Asked([3, 4], dropped)).depths
    none = model.base_pass(batch.token_ids, batch.positions, Asked([3, 4], dropped[:0])).depths
    torch.testing.assert_close(some[3], none[3], atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(some[4][0], none[4][0], atol=1e-6, rtol=1e-5)
    assert torch.equal(some[4][1], some[3][1]) and not torch.equal(none[4][1], none[3][1])


def test_adapters_can_be_left_out_for_a_while(base_folder):
    module = make(base_folder, exits=[LINEAR], backbone="lora")
    plain = make(base_folder, exits=[LINEAR])
    for adapters in module.model.backbone.values():
        torch.nn.init.normal_(adapters["B"]["default"].weight)

    def target(model):
        return model(collate(ROWS).token_ids).target.detach()

    trained = list(module.model.trained())
    with without_adapters(module.model.base):
        assert torch.equal(target(module.model), target(plain.model))
    assert not torch.allclose(target(module.model), target(plain.model))
    assert list(module.model.trained()) == trained


def test_a_resumed_run_with_adapters_ends_with_the_weights_of_an_uninterrupted_one(base_folder, data, tmp_path):
    """Stopped within an epoch and a step; adapters drop out, so the random state counts too."""

    class Stops(EarlyExitModule):
        def training_step(self, batch, index):
            if self.trainer.fit_loop.epoch_loop.total_batch_idx == 5:
                raise RuntimeError("stopped")
            return super().training_step(batch, index)

    options = {"backbone": "lora", "lora": Lora(r=2, dropout=0.3, lr=0.01), "warmup_steps": 0}
    data.batch_size = 2

    def fit(kind, folder, **more):
        torch.manual_seed(0)
        module = kind(str(base_folder), [LAYER, LINEAR], **options)
        run = trainer(folder, max_epochs=2, accumulate_grad_batches=2, limit_val_batches=0)
        run.fit(module, datamodule=data, **more)
        return module

    whole = fit(EarlyExitModule, tmp_path / "whole")
    with pytest.raises(RuntimeError, match="stopped"):
        fit(Stops, tmp_path / "part")
    resumed = fit(EarlyExitModule, tmp_path / "part", ckpt_path=tmp_path / "part" / "interrupted.ckpt")
    states = whole.state_dict(), resumed.state_dict()
    assert any("backbone" in name for name in states[0])
    for name, weight in states[0].items():
        torch.testing.assert_close(states[1][name], weight, atol=1e-6, rtol=0)
    other = EarlyExitModule(str(base_folder), [LAYER, LINEAR], backbone="lora", lora=Lora(target_modules=["q_proj"]))
    with pytest.raises(
        ValueError, match=r"of model\.backbone=lora \(adapters on .*'down_proj'.* lora \(\['q_proj'\]\)"
    ):
        trainer(tmp_path / "part").fit(other, datamodule=data, ckpt_path=tmp_path / "part" / "last.ckpt")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"backbone": "half"}, r"model\.backbone='half' must be one of frozen, lora, full"),
        ({"lora": Lora()}, r"model\.lora is given, but model\.backbone=frozen"),
        ({"backbone": "lora", "layerskip": LayerSkip()}, r"model\.layerskip is given.*set model\.backbone=full"),
        ({"backbone": "full", "dtype": "bfloat16"}, r"model\.dtype=bfloat16 with model\.backbone=full.*float32"),
        ({"backbone": "lora", "lora": Lora(r=0)}, r"model\.lora\.r=0"),
        ({"backbone": "lora", "lora": Lora(text_weight=0.0)}, r"model\.lora\.text_weight=0\.0.*nothing else trains"),
        ({"backbone": "lora", "lora": Lora(dropout=1.0)}, r"model\.lora\.dropout=1\.0"),
        (
            {"backbone": "lora", "lora": Lora(target_modules=["q_proj", "lm_head"])},
            r"model\.lora\.target_modules: 'lm_head' .*no linear layer inside a decoder layer.*has q_proj, k_proj",
        ),
        ({"backbone": "lora", "lora": Lora(target_modules=[])}, r"model\.lora\.target_modules is empty"),
        (
            {"backbone": "full", "exits": [ExitConfig(name="a", layer=1, head="native", loss=ExitLoss(kl=1.0))]},
            r"exits\.a\.loss: with model\.backbone=full LayerSkip's losses",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(base_folder, options, reason):
    with pytest.raises(ValueError, match=reason):
        make(base_folder, **options)


def test_adapters_on_tied_weights_are_refused_by_name(tmp_path, tiny_model):
    base = save_base(tmp_path / "tied", tiny_model, "llama", tie_word_embeddings=True)
    for name in ("lm_head", "embed_tokens"):
        lora = Lora(target_modules=["q_proj", name])
        reason = rf"model\.lora\.target_modules: '{name}' .*tie_word_embeddings.*Leave it out"
        with pytest.raises(ValueError, match=reason):
            make(base, backbone="lora", lora=lora)


def test_opt_has_adapters_on_its_own_layers(plain_folder):
    module = make(plain_folder, exits=[LINEAR], backbone="lora")
    assert module.model.adapted == ["k_proj", "v_proj", "q_proj", "out_proj", "fc1", "fc2"]
    assert exit_grads(module, "text")
