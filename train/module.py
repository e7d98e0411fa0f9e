"""Training the exits with Lightning: loss, weighting, validation figures; knows nothing of files or command lines."""

# Shape legend: N label positions of a batch

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from infer.hub import find_folder
from train.acceptance import MAX_DRAFT_TOKENS
from train.backbone import Backbone, Lora, check_backbone
from train.base_model import dtype_of, load_base
from train.base_pass import NOTHING, Asked, BasePass, pass_again
from train.batches import Batch
from train.checkpoint import check_record, checkpoints_for, record_of
from train.closed_form import fit_linear_parts
from train.context import after_prompt
from train.costs import check_costs, default_costs
from train.features import FeatureCache
from train.figures import Figures
from train.heads import ExitConfig, choose_draft_vocab
from train.labels import Labels, labels_of, losses_of
from train.layerskip import LayerSkip, dropped_rows, exit_weights
from train.linear_loss import text_loss
from train.model import EarlyExitModel
from train.optimizer import adamw, lr_scale, parameter_groups, set_rates
from train.resume import random_states, set_random_states
from train.sharding import asks_for_shards
from train.shards import shard
from train.step import Step
from train.validation import count


class EarlyExitModule(LightningModule):
    """Exit heads over a base, trained to say what the base would say; the base is frozen, or trained with them.

    Args:
        base: `smollm2-135m` (embedded), a local folder, or a hub id.
        exits: the exits, ordered by depth.
        revision: branch, tag or commit of a hub id.
        dtype: precision of the frozen base: float32, bfloat16 or float16. The heads' weights are float32 always; what
            they compute in is trainer.precision.
        backbone: what of the base is trained: `frozen`, nothing; `lora`, adapters; `full`, all of it by LayerSkip's
            recipe. The last two give a new reference model: what is served then is no longer the base.
        lora: the adapters, for backbone lora.
        layerskip: the recipe, for backbone full.
        lr: highest learning rate of the heads.
        weight_decay: AdamW's, on matrices only.
        warmup_steps: optimizer steps over which the rate grows; it then falls linearly, to a tenth at the end.
        betas: AdamW's.
        num_draft_tokens: γ, 1 to 63, the longest window of drafts whose acceptance validation counts, position by
            position.
        costs: exit name or `target` → cost of one call as a share of a plain decoding step, for the predicted speed-up.
            Where not named: the share of the weights that the call reads.
        heads_dtype: precision of the weights in the folder heads/, which export reads; bfloat16 takes half the space.
        max_skipped_steps: steps in a row that may be left out because loss or gradient is not finite, before training
            stops.
        closed_form_labels: labels on which the linear parts of heads are fitted in closed form before the first step,
            so that training need not look for them; 0 begins with zeros.
        warm_start: a folder heads/, or a hub id of one, whose weights to begin with. Nothing else is taken over; to go
            on with a run that stopped, give --ckpt_path instead.
    """

    def __init__(
        self,
        base: str,
        exits: list[ExitConfig],
        *,
        revision: str | None = None,
        dtype: str = "float32",
        backbone: Backbone = "frozen",
        lora: Lora | None = None,
        layerskip: LayerSkip | None = None,
        lr: float = 1e-3,
        weight_decay: float = 0.01,
        warmup_steps: int = 20,
        betas: tuple[float, float] = (0.9, 0.95),
        num_draft_tokens: int = 4,
        costs: dict[str, float] | None = None,
        heads_dtype: str = "float32",
        max_skipped_steps: int = 10,
        closed_form_labels: int = 16_384,
        warm_start: str | None = None,
    ) -> None:
        super().__init__()
        self.lr, self.weight_decay, self.warmup_steps, self.betas = lr, weight_decay, warmup_steps, betas
        if not lr > 0:
            raise ValueError(f"model.lr={lr} must be greater than 0")
        if warmup_steps < 0:
            raise ValueError(f"model.warmup_steps={warmup_steps} must be at least 0")
        if not 1 <= num_draft_tokens <= MAX_DRAFT_TOKENS:
            raise ValueError(
                f"model.num_draft_tokens={num_draft_tokens} must lie in [1, {MAX_DRAFT_TOKENS}], as the engine "
                "judges no longer window at once; 2 to 8 are usual"
            )
        if max_skipped_steps < 0:
            raise ValueError(f"model.max_skipped_steps={max_skipped_steps} must be at least 0")
        if closed_form_labels < 0:
            raise ValueError(f"model.closed_form_labels={closed_form_labels} must be at least 0")
        check_backbone(backbone, exits, dtype, lora is not None, layerskip is not None)
        self.lora, self.layerskip = lora or Lora(), layerskip or LayerSkip()
        self.lora.check("model.lora")
        self.layerskip.check("model.layerskip")
        check_costs(costs or {}, [e.name for e in exits])
        self.heads_dtype = dtype_of(heads_dtype, "model.heads_dtype")
        self.model = EarlyExitModel(load_base(base, revision, dtype), exits)
        self.model.heads.float().train()
        self.is_warm = warm_start is not None
        if warm_start is not None:
            self.model.load_heads(find_folder(warm_start))
        if backbone == "lora":
            self.model.adapt(self.lora)
        elif backbone == "full":
            self.model.train_base().train()
        self._closed_form_labels = 0 if self.is_warm else closed_form_labels
        self._is_sharded = False
        self._step = Step(max_skipped_steps)
        self._stopped: dict[str, Any] = {}  # what a checkpoint held of the moment at which it was written
        self.num_draft_tokens = num_draft_tokens
        self.costs = default_costs(self.model) | (costs or {})
        self.figures = self._new_figures()

    # ---- set-up ----

    def setup(self, stage: str) -> None:
        """Choose the trimmed vocabularies by counting the labels, which the target itself has written."""
        missing = self.model.missing_draft_vocabs()
        if stage == "fit" and missing:
            data = getattr(self.trainer, "datamodule", None)
            if data is None:
                raise ValueError(
                    f"exits.{missing[0].name}.vocab_size: give a DistillationDataModule, to count tokens in"
                )
            counts = data.label_counts(self.model.family.vocab_size)
            for exit_ in missing:
                ids = choose_draft_vocab(counts, exit_.vocab_size or 0, self.model.eos_token_ids)
                self.model.set_draft_vocab(exit_.name, ids)

    def configure_model(self) -> None:
        """With ModelParallelStrategy, FSDP2. Lightning calls this before every fit, validate and test."""
        if not self._is_sharded and asks_for_shards(self.trainer.strategy, self.model.mode):
            groups = [*self.model.family.decoder.layers, *self.model.heads.values()]
            shard(groups, self.trainer.strategy.device_mesh["data_parallel"])
            self._is_sharded = True

    def configure_callbacks(self) -> list[Callback]:
        return [FeatureCache(), *checkpoints_for(self.trainer)]

    def configure_optimizers(self) -> Any:
        groups = self._parameter_groups()
        if not groups:
            raise ValueError("all exits are native: nothing to train. Use `validate`, and `export --config`")
        optimizer = adamw(groups, fused=self.device.type == "cpu" and not self._is_sharded)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, self._lr_scale)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def _parameter_groups(self) -> list[dict[str, Any]]:
        model, backbone_lr = self.model, {"lora": self.lora.lr, "full": self.layerskip.lr}.get(self.model.mode, 0.0)
        parts = [(model.trainable_parameters(), self.lr), (model.trainable_backbone(), backbone_lr)]
        return parameter_groups(parts, self.weight_decay, self.betas)

    def _lr_scale(self, step: int) -> float:
        return lr_scale(step, self.warmup_steps, int(self.trainer.estimated_stepping_batches))

    def on_fit_start(self) -> None:
        self._place_base()

    def on_validation_start(self) -> None:
        self._place_base()
        missing = self.model.missing_draft_vocabs()
        if missing:
            raise ValueError(
                f"exits.{missing[0].name}.vocab_size={missing[0].vocab_size}: which ids is known only after training; "
                "give --ckpt_path or --model.warm_start"
            )

    def on_test_start(self) -> None:
        self.on_validation_start()

    def _place_base(self) -> None:
        """The base is no child of this module, so Lightning doesn't move it."""
        self.model.place(self.device)

    def on_train_start(self) -> None:
        """After a resume the config's numbers hold, not those that the checkpoint stored."""
        if self._closed_form_labels:
            self._fit_linear_parts()
        self._step.begin()
        set_rates(self.lr_schedulers(), self._parameter_groups(), self._lr_scale)
        if "step" in self._stopped:
            self._step.load_state(self._stopped["step"], self.model.trained())
        if "random" in self._stopped:
            set_random_states(self._stopped["random"])
        self._stopped = {}

    def _fit_linear_parts(self) -> None:
        data = getattr(self.trainer, "datamodule", None)
        rows = [] if data is None else list(data.train_rows)
        random.Random(0).shuffle(rows)  # files may be sorted
        for name, fit in fit_linear_parts(self.model, rows, self._closed_form_labels).items():
            rank_zero_info(f"{name}: linear parts fitted in closed form, {fit}")
        # DDP made parameters equal before this, and sums differ in their last bits
        if self.trainer.world_size > 1 and not self._is_sharded:
            for parameter in self.model.heads.parameters():
                parameter.data.copy_(self.trainer.strategy.broadcast(parameter.data.cpu()))
        self._closed_form_labels = 0

    # ---- training ----

    def training_step(self, batch: Batch, index: int) -> Tensor:
        """The loss summed over this batch's labels; `on_before_optimizer_step` divides by the step's labels."""
        if index % self.trainer.accumulate_grad_batches == 0:
            self._step.begin()  # as Lightning's zero_grad: a batch may come again after an interrupt
        # Keyed by the place in the run, so that a run that was stopped and goes on sees the same windows
        key = (self.current_epoch << 40) + (index << 16) + self.global_rank
        draw, weights = torch.Generator().manual_seed(key), self._text_weights()
        labels = self.labels(batch, draw, self._asked(weights, len(batch.token_ids), draw))
        num_labels = len(labels.breaks)
        total = torch.zeros((), device=self.device)
        for depth, weight in weights.items():
            text = text_loss(labels.depths[depth], labels.ids, self.model.unembed)
            total = total + weight * text
            if depth == self.model.family.num_layers:
                self.log("train/target/ce", text.detach() / max(1, num_labels), batch_size=num_labels)
        for name, loss in losses_of(self.model, labels).items():
            total = total + loss.total
            figures = {"loss": loss.total.detach(), **loss.terms}
            self.log_dict(
                {f"train/{name}/{key}": value / max(1, num_labels) for key, value in figures.items()},
                batch_size=num_labels,
            )
        self._step.add(total, num_labels)
        self.log("train/loss", total.detach() / max(1, num_labels), prog_bar=True, batch_size=num_labels)
        return total

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        trainer = self.trainer
        # Lightning has divided by accumulate_grad_batches, and DDP by the number of ranks
        undo = trainer.accumulate_grad_batches * trainer.world_size
        parameters = self.model.trained()
        self._step.finish(parameters, lambda sums: trainer.strategy.reduce(sums, reduce_op="sum"), undo)
        self.log("train/skipped_steps", float(self._step.num_skipped))

    def _text_weights(self) -> dict[int, float]:
        """Depth → weight of the text's own cross-entropy there, which trains the base."""
        num_layers, mode = self.model.family.num_layers, self.model.mode
        if mode == "frozen":
            return {}
        if mode == "lora":
            return {num_layers: self.lora.text_weight}
        num_steps = int(self.trainer.estimated_stepping_batches)
        return exit_weights(self.layerskip, num_layers, self.global_step, num_steps)

    def _asked(self, weights: Mapping[int, float], num_rows: int, draw: torch.Generator) -> Asked:
        if self.model.mode != "full":
            return Asked(list(weights), NOTHING.dropped)
        num_layers = self.model.family.num_layers
        return Asked(list(weights), dropped_rows(num_layers, self.layerskip.max_dropout, num_rows, draw))

    def labels(self, batch: Batch, draw: torch.Generator | None = None, asked: Asked = NOTHING) -> Labels:
        """The states that predict the batch's labels; the label at t is predicted at t − 1."""
        passed = self._base_pass(batch, asked)
        return labels_of(batch, self.model.outputs(passed, after_prompt(batch.loss_mask), draw))

    def _base_pass(self, batch: Batch, asked: Asked = NOTHING) -> BasePass:
        """Of the base itself, or from the feature cache."""
        if batch.kept is None:
            return self.model.base_pass(batch.token_ids, batch.positions, asked)
        return pass_again(self.model.family, batch.kept.hidden, batch.token_ids, batch.positions)

    # ---- validation ----

    def _new_figures(self) -> Figures:
        return Figures([e.name for e in self.model.exits], self.costs, self.num_draft_tokens)

    def on_validation_epoch_start(self) -> None:
        self.figures = self._new_figures()

    def validation_step(self, batch: Batch, _: int) -> None:
        count(self.model, batch, self._base_pass(batch), self.figures)

    def on_validation_epoch_end(self) -> None:
        self._log_figures("val")

    def on_test_epoch_start(self) -> None:
        self.on_validation_epoch_start()

    def test_step(self, batch: Batch, index: int) -> None:
        self.validation_step(batch, index)

    def on_test_epoch_end(self) -> None:
        self._log_figures("test")

    def _log_figures(self, stage: str) -> None:
        """Figures of all ranks together."""
        sums = torch.tensor(self.figures.sums(), dtype=torch.float64, device=self.device)
        self.figures.set_sums(self.trainer.strategy.reduce(sums, reduce_op="sum").tolist())
        for key, value in self.figures.named().items():
            self.log(f"{stage}/{key}", value, prog_bar=key in ("acceptance_length", "speedup"))

    # ---- checkpoints ----

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["early_exit"] = record_of(self.model)
        stopped: dict[str, Any] = {"random": random_states()}
        # Of several ranks only one writes, and what it has is only its own part: there the half step is dropped
        if self._step.num_tokens and self.trainer.world_size == 1:
            stopped["step"] = self._step.state(self.model.trained())
        checkpoint["stopped"] = stopped

    def on_load_checkpoint(self, checkpoint: Mapping[str, Any]) -> None:
        """Refuse a checkpoint of other exits or another base before any weight is touched."""
        record = check_record(self.model, checkpoint.get("early_exit"))
        for name, ids in record["draft_vocabs"].items():
            self.model.set_draft_vocab(name, torch.tensor(ids, dtype=torch.int64))
        if checkpoint.get("global_step"):
            self._closed_form_labels = 0
        self._stopped = checkpoint.get("stopped", {})
