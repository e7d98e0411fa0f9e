"""The base and the heads spread over processes by FSDP2, for bases that don't fit one device.

Each decoder layer of the base and each head is a group: gathered when it runs, and freed after. Embedding, final norm
and unembedding stay whole on every process, as they are read as matrices and not only called. This file knows nothing
of losses, files or Lightning.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor


def shard(groups: Iterable[nn.Module], mesh: Any) -> None:
    """Spread the parameters of each group over `mesh`, in place; groups without parameters stay as they are."""
    for group in groups:
        if next(group.parameters(), None) is not None:
            fully_shard(group, mesh=mesh, reshard_after_forward=True)


def whole(tensor: Tensor) -> Tensor:
    """All of a sharded tensor, for which every process must ask together; any other as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def set_whole(parameter: Tensor, value: Tensor) -> None:
    """Give a parameter its value; a sharded one the value that the first process has, and all must do so together."""
    if isinstance(parameter, DTensor):
        value = distribute_tensor(value.to(parameter.dtype), parameter.device_mesh, parameter.placements)
    parameter.copy_(value)


@contextmanager
def gathered(module: nn.Module) -> Iterator[None]:
    """A sharded module's parameters are whole inside, for what reads them without calling the module."""
    if isinstance(module, FSDPModule):
        module.unshard()
    yield
    if isinstance(module, FSDPModule):
        module.reshard()
