"""What a training checkpoint holds beside Lightning's own, and when one is written.

A `.ckpt` holds what is trained (heads; adapters or the base too), the optimizer and plain types only, so it loads with
`weights_only=True`; beside it stands the folder heads/, which is what `export` reads. This file knows nothing of losses
or data.
"""

from __future__ import annotations

import pickle
import signal
import threading
from pathlib import Path
from typing import Any, cast

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.exceptions import SIGTERMException

from train.base_model import base_fingerprint, load_base
from train.counting import Validates, promise
from train.drift import measure_drift
from train.family import Family
from train.heads import exit_configs
from train.model import EarlyExitModel
from train.promise import Promise
from train.reference import Drift

MONITOR = "val/acceptance_length"


class HeadsFolder(Callback):
    """Writes `<default_root_dir>/heads` whenever validation is the best so far."""

    def __init__(self) -> None:
        self.best = float("-inf")

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        value = trainer.callback_metrics.get(MONITOR)
        if trainer.sanity_checking or trainer.state.fn != "fit" or value is None or not float(value) > self.best:
            return
        self.best = float(value)
        rows = getattr(getattr(trainer, "datamodule", None), "val_rows", [])
        # On every rank, as heads that are sharded compute together, and with the precision of validation
        with trainer.precision_plugin.val_step_context():
            found = promise(cast(Validates, pl_module), rows)
        self._save(trainer, pl_module, found)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.best == float("-inf"):  # never validated
            self._save(trainer, pl_module, None)

    def _save(self, trainer: Trainer, pl_module: LightningModule, found: Promise | None) -> None:
        folder, writes = Path(trainer.default_root_dir) / "heads", trainer.is_global_zero
        drift = self._drift(trainer, pl_module.model) if writes else None
        pl_module.model.save_heads(folder, pl_module.heads_dtype, drift, found, writes=writes)

    def _drift(self, trainer: Trainer, model: EarlyExitModel) -> Drift | None:
        """Of a new reference model, on the held-out rows; None where there is none, or no rows to measure it on."""
        rows = getattr(getattr(trainer, "datamodule", None), "val_rows", [])
        if model.mode == "frozen" or not rows:
            return None
        before, was_training = model.family, model.training
        if model.mode == "full":
            base = model.base
            original = load_base(base.base_name, base.base_revision)
            before = Family(original.to(base.device))
        model.eval()
        drift = measure_drift(model.family, before, rows)
        model.train(was_training)
        print(f"the reference model is a new one (model.backbone={model.mode}): {drift}", flush=True)
        return drift

    def state_dict(self) -> dict[str, float]:
        return {"best": self.best}

    def load_state_dict(self, state_dict: dict[str, float]) -> None:
        self.best = state_dict["best"]


class InterruptedCheckpoint(OnExceptionCheckpoint):
    """Writes interrupted.ckpt when `fit` is stopped by SIGTERM, Ctrl-C or an error; a run that ends well removes it."""

    def __init__(self, dirpath: str) -> None:
        super().__init__(dirpath, "interrupted")
        self.asked_to_stop = False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Lightning's own handler calls the other ranks from inside the signal, whatever they are exchanging at that
        # moment, and may hang. Ours only takes note. Lightning restores the handler from before the run.
        if trainer.world_size > 1 and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._ask_to_stop)

    def _ask_to_stop(self, *_: object) -> None:
        self.asked_to_stop = True

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Stop all ranks at one batch as soon as one of them is asked to."""
        if trainer.world_size > 1:
            asked = torch.tensor(float(self.asked_to_stop), device=pl_module.device)
            if float(trainer.strategy.reduce(asked, reduce_op="sum")):
                raise SIGTERMException

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if trainer.state.fn != "fit" or trainer.fit_loop.epoch_loop.batch_progress.total.completed == 0:
            return
        # All ranks must write together: an error may be of one alone
        if trainer.world_size > 1 and not isinstance(exception, (SIGTERMException, KeyboardInterrupt)):
            return
        super().on_exception(trainer)
        rank_zero_info(f"Stopped; to go on: --ckpt_path {self.ckpt_path}")

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            super().teardown(trainer)


def checkpoints_for(trainer: Trainer) -> list[Callback]:
    """best.ckpt, last.ckpt and heads/ in the run's folder, interrupted.ckpt where a run was stopped; a ModelCheckpoint
    of the user's own stands in for best and last."""
    own = [c for c in trainer.checkpoint_callbacks if isinstance(c, ModelCheckpoint) and c.dirpath is not None]
    if not trainer.checkpoint_callbacks or trainer.fast_dev_run:
        return []
    always: list[Callback] = [HeadsFolder(), InterruptedCheckpoint(trainer.default_root_dir)]
    if own:
        return always
    # With save_last, last.ckpt would stay behind while validation gets no better
    last = ModelCheckpoint(dirpath=trainer.default_root_dir, filename="last", enable_version_counter=False)
    if trainer.limit_val_batches == 0:
        return [*always, last]
    best = ModelCheckpoint(
        dirpath=trainer.default_root_dir, filename="best", monitor=MONITOR, mode="max", enable_version_counter=False
    )
    return [*always, best, last]


def check_checkpoint(path: str) -> None:
    """Raise ValueError unless `path` is a whole checkpoint that holds plain data and nothing that runs on loading."""
    if not Path(path).is_file():
        raise ValueError(
            f"ckpt_path={path}: no such file; `fit` leaves last.ckpt, best.ckpt or interrupted.ckpt in its folder"
        )
    try:
        torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (RuntimeError, pickle.UnpicklingError, EOFError, KeyError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"ckpt_path={path}: cut short, or no checkpoint of `fit`: {reason}") from error


def record_of(model: EarlyExitModel) -> dict[str, Any]:
    """Exits, trimmed vocabularies and the base's identity as plain types."""
    return {
        "base": base_fingerprint(model.base),
        "exits": _plain_exits(model),
        "backbone": {"mode": model.mode, "adapted": model.adapted},
        "draft_vocabs": {name: ids.tolist() for name, ids in model.draft_vocabs.items()},
    }


def check_record(model: EarlyExitModel, record: Any) -> dict[str, Any]:
    """The record, if it fits `model`; else ValueError that says what differs."""
    if not isinstance(record, dict):
        raise ValueError("the checkpoint was not written by `python -m train fit`: it has no record of exits")
    if exit_configs(record["exits"]) != list(model.exits):
        raise ValueError(
            f"the checkpoint holds the exits {record['exits']}, but the config asks for {_plain_exits(model)}. "
            "To go on with that run make model.exits equal; to train other exits start anew, without --ckpt_path"
        )
    backbone = record.get("backbone", {"mode": "frozen", "adapted": []})  # older ones knew no other
    if backbone != {"mode": model.mode, "adapted": model.adapted}:
        raise ValueError(
            f"the checkpoint is of model.backbone={backbone['mode']} (adapters on {backbone['adapted']}), but the "
            f"config asks for {model.mode} ({model.adapted}); make model.backbone and model.lora equal, or start anew"
        )
    own = base_fingerprint(model.base)
    if record["base"]["config_sha256"] != own["config_sha256"]:
        raise ValueError(
            f"the checkpoint was trained on {record['base']['name']!r}, whose config differs from that of "
            f"{own['name']!r}; give the same model.base"
        )
    return record


def _plain_exits(model: EarlyExitModel) -> list[dict[str, Any]]:
    return [e.record() for e in model.exits]
