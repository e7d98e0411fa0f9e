"""The Lightning module on tiny bases: weighting, checkpoints, resume, trimmed vocabularies."""

import dataclasses
import json

import pytest
import torch
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader

from train.batches import collate, collate_packed
from train.chat import Encoded
from train.data import DistillationDataModule
from train.heads import ExitConfig
from train.labels import losses_of
from train.losses import ExitLoss
from train.module import EarlyExitModule

EXITS = [
    ExitConfig(name="draft", layer=2, head="layer", vocab_size=64),
    ExitConfig(name="intermediate", layer=4, head="linear"),
]


@pytest.fixture
def data(base_folder, tmp_path):
    file = tmp_path / "rows.jsonl"
    rows = [{"prompt": f"The {n}", "response": "snow is so slow " + "now " * (n % 4)} for n in range(12)]
    file.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return DistillationDataModule(str(file), str(file), base=str(base_folder), batch_size=4)


def trainer(root, **options):
    silent = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "accelerator": "cpu"}
    return Trainer(default_root_dir=root, **(silent | {"max_epochs": 1} | options))


def test_a_token_weighs_the_same_in_one_batch_and_over_accumulated_ones(base_folder, tmp_path):
    """B01: rows of 1 and 7 labels, accumulate 2 against batch 2, and both packed into one sequence."""
    exits = [ExitConfig(name="draft", layer=2, head="linear"), ExitConfig(name="intermediate", layer=4, head="layer")]
    torch.manual_seed(0)
    rows = [Encoded(torch.randint(3, 320, (9,)).tolist(), [False] * (9 - n) + [True] * n) for n in (1, 7)]

    def heads_after_a_step(batches, accumulate):
        module = EarlyExitModule(str(base_folder), exits, lr=0.1, warmup_steps=0)
        module.configure_optimizers = lambda: torch.optim.SGD(module.model.trainable_parameters(), lr=0.1)
        module.on_train_start = lambda: None
        run = trainer(tmp_path, accumulate_grad_batches=accumulate, enable_checkpointing=False)
        run.fit(module, DataLoader(batches, batch_size=None))
        return module.model.heads.state_dict()

    whole = heads_after_a_step([collate(rows)], 1)
    split = heads_after_a_step([collate([rows[0]]), collate([rows[1]])], 2)
    packed = heads_after_a_step([collate_packed([rows])], 1)
    before = EarlyExitModule(str(base_folder), exits).model.heads.state_dict()
    for name in whole:
        torch.testing.assert_close(whole[name], split[name], atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(whole[name], packed[name], atol=1e-6, rtol=1e-6)
    for exit_ in ("draft.linear.weight", "intermediate.norm.weight"):
        assert not torch.equal(before[exit_], whole[exit_])


def test_fit_lowers_the_loss_and_leaves_heads_that_load(base_folder, data, tmp_path):
    module = EarlyExitModule(str(base_folder), EXITS, lr=3e-3, warmup_steps=1)
    run = trainer(tmp_path / "run", max_epochs=8)
    data.setup("fit")
    first = EarlyExitModule(str(base_folder), EXITS)
    first.model.set_draft_vocab("draft", torch.arange(64))
    before = trainer(tmp_path / "x").validate(first, data, verbose=False)[0]
    run.fit(module, datamodule=data)
    after = trainer(tmp_path / "x").validate(module, data, verbose=False)[0]
    assert after["val/intermediate/loss"] < before["val/intermediate/loss"]
    assert 1 <= after["val/draft/acceptance_length"] <= 5
    rates = [after[f"val/draft/acceptance_rate_{j}"] for j in (1, 2, 3, 4)]
    assert rates == sorted(rates, reverse=True)
    assert after["val/draft/acceptance_length"] == pytest.approx(1 + sum(rates))
    assert after["val/speedup"] >= max(after["val/draft/speedup"], after["val/hispec_speedup"])
    assert {"val/draft/agreement", "val/draft/agreement_intermediate", "val/intermediate/agreement"} <= set(after)

    warm = EarlyExitModule(str(base_folder), EXITS, warm_start=str(tmp_path / "run" / "heads"))
    assert warm.model.draft_vocabs["draft"].shape == (64,)
    assert 2 in warm.model.draft_vocabs["draft"]  # EOS


def test_a_checkpoint_holds_heads_only_and_plain_types(base_folder, data, tmp_path):
    module = EarlyExitModule(str(base_folder), EXITS)
    trainer(tmp_path).fit(module, datamodule=data)
    file = tmp_path / "last.ckpt"
    content = torch.load(file, weights_only=True)
    assert all(key.startswith("model.heads.") for key in content["state_dict"])
    heads = sum(p.numel() for p in module.model.heads.parameters()) * 4
    assert file.stat().st_size < 3 * heads + 100_000  # weights and AdamW's two moments


def test_a_step_that_is_not_finite_leaves_weights_and_moments_alone(base_folder, data, tmp_path):
    """The second of three steps is broken: the run ends as if only the other two had been."""

    class Broken(EarlyExitModule):
        def training_step(self, batch, index):
            loss = super().training_step(batch, index)
            if index in self.broken:
                self._step.add(loss * torch.nan, 0)
                return loss * torch.nan
            return loss

    def fitted(broken, **options):
        torch.manual_seed(0)
        module = Broken(str(base_folder), EXITS, lr=0.01, warmup_steps=0, **options)
        module.broken = broken
        run = trainer(tmp_path, max_epochs=1, enable_checkpointing=False)
        run.fit(module, datamodule=data)
        return run, module

    run, module = fitted({1})
    assert float(run.callback_metrics["train/skipped_steps"]) == 1
    states = run.optimizers[0].state.values()
    assert {int(state["step"]) for state in states} == {2}
    assert all(p.isfinite().all() for p in module.parameters())
    with pytest.raises(ValueError, match=r"2 optimizer steps in a row .*Lower model\.lr.*max_skipped_steps=1"):
        fitted({0, 1, 2}, max_skipped_steps=1)


def test_an_error_on_the_way_leaves_a_checkpoint_to_go_on_from(base_folder, data, tmp_path):
    class Fails(EarlyExitModule):
        def training_step(self, batch, index):
            if index == 2:
                raise RuntimeError("out of memory")
            return super().training_step(batch, index)

    with pytest.raises(RuntimeError, match="out of memory"):
        trainer(tmp_path).fit(Fails(str(base_folder), EXITS), datamodule=data)
    run = trainer(tmp_path)
    run.fit(EarlyExitModule(str(base_folder), EXITS), datamodule=data, ckpt_path=tmp_path / "interrupted.ckpt")
    assert run.global_step == 3
    trainer(tmp_path).validate(EarlyExitModule(str(base_folder), EXITS), data, tmp_path / "last.ckpt", verbose=False)
    assert not (tmp_path / "interrupted.ckpt").exists()


def test_resume_goes_on_and_refuses_other_exits(base_folder, data, tmp_path):
    trainer(tmp_path).fit(EarlyExitModule(str(base_folder), EXITS), datamodule=data)
    again = EarlyExitModule(str(base_folder), EXITS, lr=7e-4, warmup_steps=0)
    run = trainer(tmp_path, max_epochs=2)
    run.fit(again, datamodule=data, ckpt_path=tmp_path / "last.ckpt")
    assert run.global_step == 6
    assert run.optimizers[0].param_groups[0]["initial_lr"] == 7e-4
    other = EarlyExitModule(str(base_folder), [ExitConfig(name="draft", layer=3, head="linear")])
    with pytest.raises(ValueError, match=r"holds the exits .*'layer': 2.* asks for .*'layer': 3"):
        trainer(tmp_path).fit(other, datamodule=data, ckpt_path=tmp_path / "last.ckpt")


def test_validation_before_training_names_the_missing_vocabulary(base_folder, data, tmp_path):
    with pytest.raises(ValueError, match=r"exits\.draft\.vocab_size=64.*--ckpt_path"):
        trainer(tmp_path).validate(EarlyExitModule(str(base_folder), EXITS), data, verbose=False)


def test_a_bfloat16_base_trains_float32_heads(base_folder, data, tmp_path):
    module = EarlyExitModule(str(base_folder), EXITS, dtype="bfloat16")
    trainer(tmp_path, limit_train_batches=1).fit(module, datamodule=data)
    assert {p.dtype for p in module.parameters()} == {torch.float32}


def test_an_exits_loss_is_what_its_config_asks_for(base_folder, data, tmp_path):
    """Every term moves the heads, and the logged total is the weighted sum of the logged terms."""
    exits = [
        ExitConfig(name="draft", layer=2, head="layer", vocab_size=64, loss=ExitLoss(tv=1.0, ce=0.5)),
        ExitConfig(name="intermediate", layer=4, head="linear", loss=ExitLoss(jsd=2.0, temperature=0.8)),
    ]
    run = trainer(tmp_path, limit_train_batches=1, precision="bf16-mixed")
    run.fit(EarlyExitModule(str(base_folder), exits), datamodule=data)
    seen = {key: float(value) for key, value in run.callback_metrics.items()}
    assert seen["train/draft/loss"] == pytest.approx(seen["train/draft/tv"] + 0.5 * seen["train/draft/ce"], rel=1e-5)
    assert seen["train/intermediate/loss"] == pytest.approx(2 * seen["train/intermediate/jsd"], rel=1e-5)
    assert seen["train/loss"] == pytest.approx(seen["train/draft/loss"] + seen["train/intermediate/loss"], rel=1e-5)
    # the loss is no part of what heads are: the same exits with other losses load them
    other = [dataclasses.replace(e, loss=None) for e in exits]
    EarlyExitModule(str(base_folder), other, warm_start=str(tmp_path / "heads"))


def test_every_base_layer_runs_once_for_all_exits(base_folder):
    exits = [ExitConfig(name=f"e{layer}", layer=layer, head="layer") for layer in (1, 2, 5)]
    module = EarlyExitModule(str(base_folder), exits)
    runs = []
    for number, layer in enumerate(module.model.family.decoder.layers):
        layer.register_forward_hook(lambda *_, number=number: runs.append(number))
    losses_of(module.model, module.labels(collate([Encoded([5, 6, 7], [False, True, True])])))
    assert runs == [0, 1, 2, 3, 4, 5]


def test_every_parameter_gets_a_gradient_even_from_rows_without_labels(base_folder):
    """B16: under DDP a parameter that no gradient reaches stops the run."""
    exits = [
        ExitConfig(name="a", layer=1, head="native"),
        ExitConfig(name="b", layer=2, head="layer", loss=ExitLoss(ce=1.0)),
        ExitConfig(name="c", layer=4, head="linear"),
    ]
    module = EarlyExitModule(str(base_folder), exits)
    for mask in ([False, True, True], [False, False, False]):
        labels = module.labels(collate([Encoded([5, 6, 7], mask)]))
        module.zero_grad()
        sum(loss.total for loss in losses_of(module.model, labels).values()).backward()
        assert [n for n, p in module.named_parameters() if p.requires_grad and p.grad is None] == []


def test_costs_are_the_weights_that_a_call_reads_unless_the_config_knows_better(base_folder):
    module = EarlyExitModule(str(base_folder), EXITS, costs={"intermediate": 0.5})
    layer = sum(p.numel() for p in module.model.family.decoder.layers[0].parameters())
    plain = 6 * layer + 320 * 48
    assert module.costs["draft"] == pytest.approx((3 * layer + 48 + 64 * 48) / plain)  # its own layer and norm too
    assert (module.costs["intermediate"], module.costs["target"]) == (0.5, 1.0)
    for costs, reason in [({"drat": 1.0}, r"model\.costs: 'drat' is none of draft"), ({"draft": 0.0}, r"draft=0\.0")]:
        with pytest.raises(ValueError, match=reason):
            EarlyExitModule(str(base_folder), EXITS, costs=costs)


def test_exits_with_equal_vocabularies_share_one_tensor_of_ids(base_folder):
    """So the loss knows, without looking at the ids, that one law of the target's serves both."""
    exits = [dataclasses.replace(exit_, vocab_size=64) for exit_ in EXITS]
    model = EarlyExitModule(str(base_folder), exits).model
    model.set_draft_vocab("draft", torch.arange(64))
    model.set_draft_vocab("intermediate", torch.arange(64))
    assert model.place("cpu").draft_vocabs["draft"] is model.draft_vocabs["intermediate"]
    model.set_draft_vocab("intermediate", torch.arange(1, 65))
    assert torch.equal(model.draft_vocabs["draft"], torch.arange(64))


def test_the_fused_optimizer_of_a_cpu_goes_with_clipping_in_mixed_precision(base_folder, data, tmp_path):
    module = EarlyExitModule(str(base_folder), EXITS, lr=1e-3)
    run = trainer(tmp_path, precision="bf16-mixed", gradient_clip_val=1e-9, limit_val_batches=0)
    run.fit(module, datamodule=data)
    assert module.optimizers().param_groups[0]["fused"] is True
    moments = [state["exp_avg"].norm() for state in module.optimizers().optimizer.state.values()]
    assert 0 < max(moments) < 1e-9


@pytest.mark.parametrize("number", [0, 64, 80])
def test_more_drafts_than_the_engine_judges_at_once_are_refused_before_training(base_folder, number):
    with pytest.raises(ValueError, match=rf"model\.num_draft_tokens={number} must lie in \[1, 63\]"):
        EarlyExitModule(str(base_folder), EXITS, num_draft_tokens=number)
    if number == 64:
        assert EarlyExitModule(str(base_folder), EXITS, num_draft_tokens=number - 1).num_draft_tokens == 63
