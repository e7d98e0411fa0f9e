"""What training will need, before it is begun: memory, disk and arithmetic, from the base's config alone.

Parameters are counted on a model on the meta device. What a step adds is counted by running one, forward, loss and
backward, on tensors that have shapes and no data. So code that saves one tensor more is seen here without a formula.
A checkpoint is put together in the host's memory by Lightning, as large as the file: where a CPU trains that comes on
top of what a step took, which the heap keeps. Not counted: what a GPU's allocator wastes, and what the host of a GPU
holds: the base on its way, and the checkpoint.
"""

# Shape legend: B rows, T tokens, N label positions, E size of the states that the unembedding reads

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM

from train.backbone import Backbone, Lora
from train.base_model import dtype_of
from train.base_pass import NOTHING, Asked
from train.heads import ExitConfig, exit_configs
from train.layerskip import LayerSkip, exit_weights
from train.linear_loss import CHUNK, Judge, Readout, exit_losses, text_loss
from train.model import EarlyExitModel

GB = 10**9
# Python with its libraries 0.57 GB; the rest are oneDNN's kernels and what the heap wastes, as seen on a CPU with
# SmolLM2: estimated 1.65, 3.05 (lora), 6.43 GB (full), with a checkpoint each; `fit` took 1.42 in 8 steps and 1.69 in
# an epoch, 3.4 with the drift, 6.3. On a GPU the CUDA context and the allocator are taken to need as much.
PROCESS = 9 * GB // 10

# trainer.precision → dtype of the heads' weights, and of autocast. Any other counts as float32, which needs the most.
_PRECISIONS: dict[str, tuple[torch.dtype, torch.dtype | None]] = {
    "bf16-mixed": (torch.float32, torch.bfloat16),
    "bf16": (torch.float32, torch.bfloat16),
    "16-mixed": (torch.float32, torch.float16),
    "16": (torch.float32, torch.float16),
    "bf16-true": (torch.bfloat16, None),
    "16-true": (torch.float16, None),
    "64-true": (torch.float64, None),
    "64": (torch.float64, None),
}


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What one process trains.

    Args:
        exits: ordered by depth.
        dtype: of the base: float32, bfloat16 or float16.
        precision: trainer.precision.
        batch_size, max_length: of the data; every token is taken for a label.
        packing: rows of a sequence are kept apart by a mask [B, 1, T, T].
        accumulates: gradients stay from one batch to the next.
        num_ranks: processes; with several, DDP keeps a second copy of the gradients.
        sharded: FSDP2 shares out the base's layers and the heads among them.
        backbone: what of the base is trained.
        lora, layerskip: how.
    """

    exits: Sequence[ExitConfig]
    dtype: str = "float32"
    precision: str = "32-true"
    batch_size: int = 16
    max_length: int = 512
    packing: bool = False
    accumulates: bool = False
    num_ranks: int = 1
    sharded: bool = False
    backbone: Backbone = "frozen"
    lora: Lora = field(default_factory=Lora)
    layerskip: LayerSkip = field(default_factory=LayerSkip)


def workload(config: Mapping[str, Any]) -> Workload:
    """From the parsed config of `fit`, as plain mappings. Where trainer.devices says no number, one process."""
    model, data, trainer = config["model"], config["data"], config["trainer"]
    devices = trainer["devices"]
    num_devices = len(devices) if isinstance(devices, list) else int(devices) if str(devices).isdigit() else 1
    return Workload(
        exits=exit_configs(model["exits"]),
        dtype=model["dtype"],
        precision=str(trainer["precision"]),
        batch_size=data["batch_size"],
        max_length=data["max_length"],
        packing=data["packing"],
        accumulates=trainer["accumulate_grad_batches"] > 1,
        num_ranks=num_devices * trainer["num_nodes"],
        sharded="ModelParallelStrategy" in str(trainer["strategy"]),
        backbone=model["backbone"],
        lora=Lora(**(model["lora"] or {})),
        layerskip=LayerSkip(**(model["layerskip"] or {})),
    )


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Bytes, and FLOPs a training token; memory is of the device that trains, and of one process."""

    base: int  # bytes, the base's weights
    heads: int  # bytes, of all that is trained: weights (a base's are counted above) and AdamW's two moments
    step: int  # bytes, the most that stands beside these at any time: states, gradients, logits of a chunk
    disk: int  # bytes of best.ckpt, last.ckpt and heads/
    flops: float  # a token of text, forward and backward
    checkpoint: int  # bytes of one, which the host's memory holds while it is written

    @property
    def memory(self) -> int:
        """Bytes at the peak."""
        return self.base + self.heads + self.step + PROCESS

    def line(self, tflops: float, on_cpu: bool = False) -> str:
        """All in one line.

        Args:
            tflops: 10¹² operations a second that the device is taken to reach.
            on_cpu: it is the CPU, so that a checkpoint takes of the same memory.
        """
        parts = {"base": self.base, "heads": self.heads, "step": self.step, "process": PROCESS}
        if on_cpu:
            parts["checkpoint"] = self.checkpoint
        sizes = ", ".join(f"{name} {_gb(size)}" for name, size in parts.items())
        minutes = self.flops * 1e6 / (tflops * 1e12) / 60
        peak = _gb(sum(parts.values()))
        return (
            f"peak memory {peak} GB ({sizes}), checkpoints {_gb(self.disk)} GB, {self.flops / 1e9:.3g} "
            f"GFLOP a token: {minutes:.2g} min per million tokens at {tflops:g} TFLOP/s"
        )


def estimate(config: Any, work: Workload) -> Estimate:
    """For a base of this transformers config, which is left as it is.

    Raises:
        ValueError: the base is of no supported family, or the exits don't fit it.
    """
    weights, autocast = _PRECISIONS.get(work.precision, (torch.float32, None))
    with torch.device("meta"):
        base = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=dtype_of(work.dtype))
        model = EarlyExitModel(base.eval().requires_grad_(False), work.exits)
        if work.backbone == "lora":
            model.adapt(work.lora)
    base_bytes = _num_bytes(p for name, p in base.named_parameters() if "lora_" not in name)
    if work.backbone == "full":
        model.train_base()
    model.to(weights).train()
    trained = _num_bytes(model.trained().values())
    # Of layers and heads a share; what runs is whole for as long as it does
    parts = [_num_bytes(part.parameters()) for part in (*model.family.decoder.layers, *model.heads.values())]
    running = max(parts) if work.sharded else 0
    shares = work.num_ranks if work.sharded else 1
    layers = _num_bytes(model.family.decoder.layers.parameters()) if work.sharded else 0
    flops = _flops(model, work)
    step = max(_step(model, work, autocast), 2 * trained)  # AdamW's own: the gradients, and as much for a moment
    return Estimate(
        base=base_bytes - layers + layers // shares + running,
        heads=(3 * trained - (base_bytes if work.backbone == "full" else 0)) // shares,
        step=step + (trained if work.num_ranks > 1 and not work.sharded else 0),
        disk=(1 + 2 * 3) * trained,
        flops=flops,
        checkpoint=3 * trained,
    )


def _text_depths(work: Workload, num_layers: int) -> list[int]:
    """Depths whose losses train the base, in a step that has the most of them."""
    if work.backbone == "full":
        steps = range(work.layerskip.rotation + 1)
        by_step = [list(exit_weights(work.layerskip, num_layers, step, len(steps) - 1)) for step in steps]
        return max(by_step, key=len)
    return [num_layers] if work.backbone == "lora" else []


def _gb(size: int) -> str:
    return f"{size / GB:.2f}" if size < 10 * GB else f"{size / GB:.1f}"


def _num_bytes(parameters: Iterable[Tensor]) -> int:
    return sum(p.numel() * p.element_size() for p in parameters)


# ---- arithmetic ----


def _flops(model: EarlyExitModel, work: Workload) -> float:
    """Two a weight and token forward, four more backward (Kaplan et al., arXiv 2001.08361, 2.1), but for what is frozen
    only the two of its input, where something below is trained; attention to half of the keys."""
    family, length = model.family, work.max_length
    attention = 2 * length * family.config.num_attention_heads * family.head_dim  # a layer's Q·K and A·V

    def forward(layers: nn.Module) -> float:
        return 2 * sum(p.numel() for p in layers.parameters() if p.ndim > 1)

    share = {"frozen": 1, "lora": 2, "full": 3}[model.mode]
    unembedding = 2 * family.vocab_size * family.exit_size
    total = share * (forward(family.decoder.layers) + family.num_layers * attention) + unembedding
    total += len(_text_depths(work, family.num_layers)) * (1 + share) * unembedding  # logits are computed twice
    for exit_ in model.exits:
        head = model.heads[exit_.name]
        rows = exit_.vocab_size or family.vocab_size
        total += 3 * (forward(head) + (attention if head.layer is not None else 0))
        total += (4 if exit_.trains else 2) * rows * family.exit_size
    return total


# ---- memory ----


class _Live(TorchDispatchMode):
    """Counts the bytes of the storages that operations make, while they live."""

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.seen = {t.untyped_storage()._cdata for t in known}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._add(leaf.untyped_storage())
        return out

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self.seen:
            self.seen.add(key)
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._remove, key, size)

    def _remove(self, key: int, size: int) -> None:
        self.seen.discard(key)
        self.now -= size


def _step(model: EarlyExitModel, work: Workload, autocast: torch.dtype | None) -> int:
    """Bytes that stand at most beside the weights in forward, loss and backward; `model` is on meta, and is used up.

    Layers of a frozen base are alike and leave nothing behind, so one for each span stands for all.
    """
    family, asked = model.family, Asked(_text_depths(work, model.family.num_layers), NOTHING.dropped)
    if model.mode == "frozen":
        num_spans = len(model.exits) + 1
        family.decoder.layers, family.num_layers = family.decoder.layers[:num_spans], num_spans
        model.exits = tuple(replace(e, layer=n) for n, e in enumerate(model.exits, 1))
    family.config.sliding_window = None  # its check would look at positions, which have no data
    with FakeTensorMode():
        known = _without_data([model.base, model.heads])
        ids: dict[int, Tensor] = {}  # as `fit` chooses them: of one size they are one tensor
        for exit_ in model.missing_draft_vocabs():
            size = exit_.vocab_size or 0
            model.draft_vocabs[exit_.name] = ids.setdefault(size, torch.empty(size, dtype=torch.int64))
        with _Live(known) as live:
            if work.accumulates:
                for parameter in model.trained().values():
                    parameter.grad = torch.empty_like(parameter)
            token_ids = torch.zeros(work.batch_size, work.max_length, dtype=torch.int64)
            with torch.autocast("cpu", autocast) if autocast else nullcontext():
                loss = _loss(model, token_ids, token_ids if work.packing else None, asked)
            if loss.requires_grad:
                loss.backward()
    return live.peak


def _loss(model: EarlyExitModel, token_ids: Tensor, positions: Tensor | None, asked: Asked = NOTHING) -> Tensor:
    """As `EarlyExitModule.training_step`, every token a label."""
    outputs = model(token_ids, positions, asked=asked)
    states = {name: own[:, :-1].flatten(0, 1) for name, own in outputs.exits.items()}  # [N, E]
    labels = token_ids[:, 1:].flatten()[: 2 * CHUNK]  # all chunks are alike, and the first two can overlap
    judge = Judge(outputs.target[:, :-1].flatten(0, 1), labels, model.unembed)
    readouts = {
        e.name: Readout(e.training_loss, model.exit_unembedding(e.name), model.draft_vocabs.get(e.name))
        for e in model.exits
    }
    losses = exit_losses(judge, readouts, states, part=CHUNK)  # as on a GPU, which takes the most
    depths = [own[:, :-1].flatten(0, 1)[: len(labels)] for own in outputs.depths.values()]
    texts = [text_loss(own, labels, model.unembed) for own in depths]
    return torch.stack([*(loss.total for loss in losses.values()), *texts]).sum()


def _without_data(roots: Iterable[nn.Module]) -> list[Tensor]:
    """Put tensors of the active FakeTensorMode, on the CPU, in place of those on meta; ties stay ties."""
    made: dict[int, tuple[Tensor, Tensor]] = {}  # id → it (kept, so that the id stays its own), and what replaces it

    def replacement(old: Tensor) -> Tensor:
        if id(old) not in made:
            new = torch.empty(old.shape, dtype=old.dtype, device="cpu")
            made[id(old)] = old, nn.Parameter(new, old.requires_grad) if isinstance(old, nn.Parameter) else new
        return made[id(old)][1]

    for module in (m for root in roots for m in root.modules()):
        stores: tuple[dict[str, Any], dict[str, Any]] = module._parameters, module._buffers
        for store in stores:
            store.update({name: replacement(old) for name, old in store.items() if old is not None})
    return [new for _, new in made.values()]
