"""What a stopped run needs to go on as if it had not stopped: the place in the rows, random states, half a step.

The order of an epoch is a function of (seed, epoch), and the place in it is what Lightning's loop has counted, so the
loader itself keeps nothing. Lightning restores weights, optimizer, scheduler and its counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader, DistributedSampler


class ResumableLoader(DataLoader[Any]):
    """A DataLoader that begins an epoch where the loop stands.

    Args:
        position: gives the number of this epoch's batches that are done.
    """

    def __init__(self, *args: Any, position: Callable[[], int], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.position = position

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        # A generator: it starts at the first batch, when the sampler knows the epoch and the loop its place
        batches = super().__iter__()
        for _ in range(self.position()):
            next(batches)
        yield from batches

    # By these two Lightning knows a loader that can resume
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass


def resumable(loader: DataLoader[Any], trainer: Trainer, seed: int) -> ResumableLoader:
    """The loader, but shuffled by (seed, epoch) and able to begin within an epoch; each rank has its share."""
    order: DistributedSampler[Any] = DistributedSampler(
        loader.dataset, num_replicas=trainer.world_size, rank=trainer.global_rank, shuffle=True, seed=seed
    )
    return ResumableLoader(
        loader.dataset,
        batch_size=loader.batch_size,
        sampler=order,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        generator=torch.Generator(),  # a loader without one draws from the random state that dropout draws from
        position=lambda: trainer.fit_loop.epoch_loop.batch_idx + 1,
    )


def random_states() -> dict[str, Any]:
    """Of torch, on CPU and every GPU; as plain tensors."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {"cpu": torch.get_rng_state(), "cuda": cuda}


def set_random_states(states: dict[str, Any]) -> None:
    """What `random_states` gave; those of GPUs only where there are as many as there were."""
    torch.set_rng_state(states["cpu"].cpu())
    if states["cuda"] and torch.cuda.is_available() and torch.cuda.device_count() == len(states["cuda"]):
        torch.cuda.set_rng_state_all([state.cpu() for state in states["cuda"]])
