"""Whether Lightning's strategy asks for the model to be sharded (`train.shards`), and what does not go with it."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy


def asks_for_shards(strategy: Any, backbone: str) -> bool:
    """True for `ModelParallelStrategy`.

    Raises:
        ValueError: a strategy, or a setting of it, that does not go together with this model.
    """
    if isinstance(strategy, FSDPStrategy):
        raise ValueError(
            "trainer.strategy=fsdp would leave the base whole on every process: use "
            "lightning.pytorch.strategies.ModelParallelStrategy (FSDP2), or ddp"
        )
    if not isinstance(strategy, ModelParallelStrategy):
        return False
    size = strategy.device_mesh["tensor_parallel"].size()
    if size > 1:
        num_ranks = strategy.device_mesh.size()
        raise ValueError(
            f"trainer.strategy.tensor_parallel_size={size} is not supported: set it to 1, and data_parallel_size to "
            f"{num_ranks}, the number of processes"
        )
    if strategy._save_distributed_checkpoint:
        raise ValueError(
            "trainer.strategy.save_distributed_checkpoint=true would write checkpoints as folders, which --ckpt_path "
            "does not take here: set it to false; what is trained is small"
        )
    if backbone != "frozen":
        raise ValueError(
            f"model.backbone={backbone} with ModelParallelStrategy is not supported: its gradients outside of the "
            "sharded layers would differ between processes. Set model.backbone=frozen, or trainer.strategy=ddp"
        )
    return True
