"""The feature cache: with a frozen base the states that the exits read are computed once and kept on disk.

Kept are each exit's input, the last state and the logsumexp of the target's logits. Logits would take a hundred times
the space; with their logsumexp only those that an exit can propose need be computed again. The base runs over the very
batches that training and validation will see, so that what is read later is what would be computed, bit for bit as long
as the batches stay the same.
"""

# Shape legend: B sequences, T tokens, S depths whose states are kept, D hidden size

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from typing import Any

import torch
import transformers
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from train.base_model import config_sha256
from train.chat import Encoded
from train.feature_files import FeatureFiles, Origin
from train.linear_loss import CHUNK, log_partition
from train.model import EarlyExitModel
from train.shards import whole

_TOLD_EVERY = 60  # seconds


class FeatureCache(Callback):
    """Of `fit` with `data.feature_cache`; does nothing without."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Tell the data module where its batches find their states, before any loader is made."""
        data: Any = getattr(trainer, "datamodule", None)
        folder, model = getattr(data, "feature_cache", None), pl_module.model
        if folder is None:
            return
        if stage == "fit" and model.mode != "frozen":
            raise ValueError(
                f"data.feature_cache={folder} does not go with model.backbone={model.mode}: the states of a base that "
                "is trained change with every step. Leave it out, or set model.backbone=frozen"
            )
        data.features = FeatureFiles(folder, [*data.train_rows, *data.val_rows]) if stage == "fit" else None

    @torch.no_grad()
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        data: Any = getattr(trainer, "datamodule", None)
        files, model = getattr(data, "features", None), pl_module.model
        if files is None:
            return
        model.place(pl_module.device)
        with trainer.precision_plugin.train_step_context():
            origin = origin_of(model, str(trainer.precision))
            if files.find(origin):
                rank_zero_info(f"feature cache {files.folder}: found, {_gb(files.num_bytes(origin))}")
                return
            batches = [*data.batches(data.train_rows), *data.batches(data.val_rows)]
            _write(trainer, model, data, files, origin, batches)
        assert files.find(origin), files.folder


def origin_of(model: EarlyExitModel, precision: str) -> Origin:
    """What the states of any row depend on; sharded weights are gathered by all processes together."""
    device = model.family.unembedding.device
    token = torch.zeros(1, 1, dtype=torch.int64, device=device)
    states = _states(model, token, None)
    return Origin(
        weights_sha256=_weights_sha256(model),
        config_sha256=config_sha256(model.base.config),
        depths=[*(e.layer for e in model.exits), model.family.num_layers],
        hidden_size=states.shape[-1],
        dtype=str(states.dtype).removeprefix("torch."),
        precision=precision,
        versions={"torch": torch.__version__, "transformers": transformers.__version__},
    )


def _states(model: EarlyExitModel, token_ids: Tensor, positions: Tensor | None) -> Tensor:
    """[S, B, T, D], as `pass_again` takes them."""
    passed = model.base_pass(token_ids, positions)
    states = [*passed.below, passed.last]
    if len({own.dtype for own in states}) > 1:  # some layers' norm, under autocast
        raise ValueError(
            f"data.feature_cache: the base's states are {', '.join(str(own.dtype) for own in states)}, depth by depth; "
            "set trainer.precision to 32-true or bf16-true, or leave data.feature_cache out"
        )
    return torch.stack(states)


def _weights_sha256(model: EarlyExitModel) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(model.base.state_dict().items()):
        value = whole(tensor).cpu().contiguous()
        digest.update(f"{name} {value.dtype} {tuple(value.shape)} ".encode())
        digest.update(value.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _write(
    trainer: Trainer, model: EarlyExitModel, data: Any, files: FeatureFiles, origin: Origin, batches: Sequence[Any]
) -> None:
    """Every rank its share of the batches; all take as many steps, as a sharded base runs on all ranks together."""
    device, num_ranks, begun = model.family.unembedding.device, trainer.world_size, time.monotonic()
    size = _gb(files.num_bytes(origin))
    rank_zero_info(
        f"feature cache {files.folder}: {files.num_rows} rows of {files.num_tokens} tokens in all, "
        f"{len(origin.depths)} states × {origin.hidden_size} {origin.dtype} and a number each: {size}"
    )
    if trainer.is_global_zero:
        files.begin(origin)
    trainer.strategy.barrier()
    if not trainer.is_global_zero:
        files.join(origin)
    done = files.done()
    trainer.strategy.barrier()  # all have seen the same
    told = time.monotonic()
    for first in range(0, len(batches), num_ranks):
        step = [batches[min(first + rank, len(batches) - 1)] for rank in range(num_ranks)]
        if all(done[files.number(row)] for own in step for sequence in own for row in sequence):
            continue
        batch = data.collate(step[trainer.global_rank])
        positions = None if batch.positions is None else batch.positions.to(device)
        states = _states(model, batch.token_ids.to(device), positions)
        for n, sequence in enumerate(step[trainer.global_rank]):
            _write_rows(model, files, sequence, states[:, n])
        if time.monotonic() - told > _TOLD_EVERY:
            told = time.monotonic()
            rank_zero_info(f"feature cache: {first + num_ranks} of {len(batches)} batches, {told - begun:.0f} s")
    files.close()
    trainer.strategy.barrier()
    if trainer.is_global_zero:
        files.finish()
    trainer.strategy.barrier()
    rank_zero_info(f"feature cache: written in {time.monotonic() - begun:.0f} s")


def _write_rows(model: EarlyExitModel, files: FeatureFiles, sequence: Sequence[Encoded], states: Tensor) -> None:
    """states [S, T, D] of a sequence, whose rows stand in it one after another."""
    first = 0
    for row in sequence:
        stop = first + len(row.token_ids)
        parts = model.target_states(states[-1, first:stop]).split(CHUNK)
        partition = torch.cat([log_partition(model.unembed(part)) for part in parts])  # [T]
        files.write(row, states[:, first:stop], partition.float())
        first = stop


def _gb(size: int) -> str:
    return f"{size / 1e9:.2f} GB"
