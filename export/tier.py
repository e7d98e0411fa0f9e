"""Tiers as programs: a span of layers, an exit and an unembedding, each with a flat tensor signature (DESIGN §5).

Every module here is a pure function of its arguments and of the KV pages that it is handed. What it does with its new
keys and values is its form (`export.attention`): an `inplace` one writes the pages and returns its states alone, a
`functional` one returns (states, k, v, k, v, …) and writes nothing. It knows no backend: `export.backends` compiles it,
`infer.backends` runs it.
"""

# Shape legend: B rows, T query positions, M blocks per row, S block size, D hidden, E exit size, V vocabulary, N tokens

from __future__ import annotations

from torch import Tensor, nn

from export.attention import KERNELS, Form, Pages, Places, fold_factor, page_mask
from train.family import Family
from train.heads import ExitHead

States = Tensor | tuple[Tensor, ...]  # inplace: [B, T, ..]; functional: with new k and v [B, T, K, head_dim] behind it


class PagedLayers(nn.Module):
    """Decoder layers of one family over pages: hidden [B, T, D] → [B, T, D] and the functional form's new k and v."""

    def __init__(self, family: Family, layers: list[nn.Module], form: Form) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self._family = family
        self._form = form
        weight = family.unembedding
        heads = family.config.num_attention_heads, family.num_kv_heads, family.head_dim
        self._fold = fold_factor(*heads, weight.dtype, weight.device)

    def forward(
        self, hidden: Tensor, positions: Tensor, slots: Tensor, block_table: Tensor, kv: list[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        """kv: k and v of every layer in turn, each [num_blocks, S, K, head_dim]; inplace writes them at `slots`."""
        num_slots, is_kernel = block_table.shape[1] * kv[0].shape[1], self._family.attention in KERNELS
        pages = Pages(
            slots=slots,
            block_table=block_table,
            positions=positions,
            # in the graph it would be computed though the kernel does not read it
            mask=None if is_kernel else page_mask(positions, num_slots, self._fold),
            fold=self._fold,
            caches={id(layer.self_attn): (kv[2 * i], kv[2 * i + 1]) for i, layer in enumerate(self.layers)},
            places=Places.of(positions) if self._form == "functional" else None,
            new=[],
        )
        hidden = self._family.run_each(self.layers, hidden, positions.clamp(min=0), pages=pages)
        return hidden, pages.new


class Trunk(nn.Module):
    """Layers [start, stop) of the base. The lowest trunk takes token ids, those above it hidden states."""

    def __init__(self, family: Family, start: int, stop: int, form: Form) -> None:
        super().__init__()
        self.start, self.stop = start, stop
        self._family = family
        self.paged = PagedLayers(family, list(family.decoder.layers[start:stop]), form)
        self.embedding = nn.ModuleDict(_embedding_modules(family)) if start == 0 else None

    def forward(self, x: Tensor, positions: Tensor, slots: Tensor, block_table: Tensor, kv: list[Tensor]) -> States:
        """x [B, T] int64 or [B, T, D]; positions, slots [B, T] int64, −1 and 0 for padding; → hidden [B, T, D]."""
        hidden = x if self.embedding is None else self._family.embed(x, positions.clamp(min=0))
        return _result(*self.paged(hidden, positions, slots, block_table, kv))


class LayerExit(nn.Module):
    """The exit of a head with a decoder layer of its own, over pages of its own."""

    def __init__(self, family: Family, head: ExitHead, form: Form) -> None:
        super().__init__()
        assert head.layer is not None, head.config
        self.entry = head.entry
        self.paged = PagedLayers(family, [head.layer], form)
        self.readout = _Readout(family, head.norm, None)

    def forward(
        self, hidden: Tensor, positions: Tensor, slots: Tensor, block_table: Tensor, kv: list[Tensor]
    ) -> States:
        """Hidden states that the trunk below left → states [B, T, E].

        Args:
            hidden: [B, T, D]; of a head with a context [B, T, 2 D], the target's state (or zeros) behind it.
            kv: this layer's k and v.
        """
        if self.entry is not None:
            hidden = self.entry(hidden)
        hidden, new = self.paged(hidden, positions, slots, block_table, kv)
        return _result(self.readout(hidden), new)


class FlatExit(nn.Module):
    """An exit that sees single tokens: `native`, `linear`, and the target's own (no head). hidden [N, D] → [N, E]."""

    def __init__(self, family: Family, head: ExitHead | None) -> None:
        super().__init__()
        norm = family.final_norm() if head is None or head.norm is None else head.norm
        self.readout = _Readout(family, norm, None if head is None else head.linear)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.readout(hidden)


class _Readout(nn.Module):
    """`ExitHead.readout` with all its parts as children, so that a program owns its weights by name."""

    def __init__(self, family: Family, norm: nn.Module | None, linear: nn.Module | None) -> None:
        super().__init__()
        self.linear = linear
        self.norm = norm
        self.project_out = family.decoder.project_out if family.is_opt else None

    def forward(self, hidden: Tensor) -> Tensor:
        if self.linear is not None:
            hidden = hidden + self.linear(hidden)
        if self.norm is not None:
            hidden = self.norm(hidden)
        return hidden if self.project_out is None else self.project_out(hidden)


class Unembed(nn.Module):
    """States [N, E] → logits [N, V], or over the rows of a trimmed vocabulary."""

    def __init__(self, family: Family, ids: Tensor | None = None) -> None:
        super().__init__()
        weight = family.unembedding.detach()
        self.weight = nn.Parameter(weight if ids is None else weight[ids].contiguous(), requires_grad=False)
        self._family = family

    def forward(self, states: Tensor) -> Tensor:
        return self._family.unembed(states, self.weight)


def _result(states: Tensor, new: list[Tensor]) -> States:
    return (states, *new) if new else states


def _embedding_modules(family: Family) -> dict[str, nn.Module]:
    names = ("embed_tokens", "embed_positions", "project_in") if family.is_opt else ("embed_tokens",)
    return {name: getattr(family.decoder, name) for name in names if getattr(family.decoder, name) is not None}
