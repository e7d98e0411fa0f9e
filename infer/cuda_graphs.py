"""Programs replayed as CUDA graphs: one launch for a call of decoding in place of one for every kernel.

A graph is recorded for fixed shapes and addresses. So a call is padded up to a bucket and copied into that bucket's
tensors, the graph runs, and the first rows of what it left are copied out:

    a call [B, T] over M blocks      ≤  bucket [B', T] over M'    B', M': powers of two, or the most there can be
    rows B .. B'-1                      padding: position −1, slot 0 and block 0, the null block's; never copied out
    blocks M .. M'-1 of a real row      its own first block, which positions mask (see `make_query`)

Results are copies and the caller's for as long as it likes. They have to be: all graphs share one pool of memory, so a
replay may write over what any other graph has left, and the runner holds one result over other calls (a tier's states
while its exit runs, the parts of a call that was cut).

Which bucket, what stands in the padding and how many graphs are kept is plain code, run by CPU tests with a stand-in
for the capture. `CudaCapture` alone meets CUDA. It knows neither rows nor tiers.
"""

# Shape legend: B rows, T query positions, M blocks per row, S block size, D hidden, E exit size, V vocabulary, N tokens

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from infer.manifest import Manifest, ProgramInfo

Program = Callable[..., Tensor]
# Runs a function of no arguments once or more, and gives what runs it again and the tensor that each run fills.
Capture = Callable[[Callable[[], Tensor]], tuple[Callable[[], None], Tensor]]

MAX_GRAPHS = 64  # of one program; the one that was not used for longest makes way
MIN_BLOCKS = 8  # per row: fewer cost no less, and would need graphs of their own
MAX_FLAT_TOKENS = 64  # in a call of an exit or unembedding without pages: above, the product itself takes the time
_NUM_WARM_UPS = 2  # runs before the capture, in which libraries make their workspaces


class CaptureError(Exception):
    """A program can't be recorded; `__cause__` says why."""


class CudaCapture:
    """Records into CUDA graphs that share one pool of memory, as torch.cuda.graph documents it.

    Sharing asks that graphs never run at once: they are all replayed on the stream of the one thread that steps the
    engine. The pool holds temporaries and results; inputs are made outside.
    """

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        here, side = torch.cuda.current_stream(), torch.cuda.Stream()
        side.wait_stream(here)
        with torch.cuda.stream(side):
            for _ in range(_NUM_WARM_UPS):
                run()
        here.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # thread_local: other threads of the user's process may allocate meanwhile
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            output = run()
        return graph.replay, output


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The most that a call of one program may have to be replayed; what is larger runs as it is."""

    batch: int  # B
    width: int  # T
    blocks: int  # M
    tokens: int | None  # B·T within which a token has the same bits; None: no bound

    def bucket(self, batch: int, width: int, blocks: int) -> tuple[int, int] | None:
        """(B', M') for a call [B, T] over M blocks; None when it has no graph."""
        most = self.batch if self.tokens is None else min(self.batch, self.tokens // width)
        if batch > most or width > self.width or blocks > self.blocks:
            return None
        return min(_power_of_two(batch), most), min(max(_power_of_two(blocks), MIN_BLOCKS), self.blocks)


class _Graph(NamedTuple):
    inputs: tuple[Tensor, ...]  # whose addresses the graph reads
    replay: Callable[[], None]
    output: Tensor  # whose address it writes


_Key = TypeVar("_Key")


class _Cache(Generic[_Key]):
    """The graphs of one program by bucket, at most MAX_GRAPHS."""

    def __init__(self, name: str, capture: Capture) -> None:
        self._name = name
        self._capture = capture
        self._graphs = OrderedDict[_Key, _Graph]()

    def __len__(self) -> int:
        return len(self._graphs)

    def get(self, key: _Key, run: Program, make_inputs: Callable[[], tuple[Tensor, ...]]) -> _Graph:
        """The graph of `run` over inputs of its own, made as padding alone: the first runs write the null block."""
        if key in self._graphs:
            self._graphs.move_to_end(key)
            return self._graphs[key]
        inputs = make_inputs()
        try:
            graph = _Graph(inputs, *self._capture(lambda: run(*inputs)))
        except Exception as error:
            raise CaptureError(
                f"{self._name} can't be recorded as a CUDA graph for bucket {key}: {error}; "
                "LLM(enforce_eager=True) runs without graphs"
            ) from error
        self._graphs[key] = graph
        if len(self._graphs) > MAX_GRAPHS:
            self._graphs.popitem(last=False)  # at rest: a capture begins by waiting for the device
        return graph


class PagedGraphs:
    """A trunk or a `layer` exit, called as the program itself; `program` is the program."""

    def __init__(self, name: str, program: Program, sizes: Sizes, capture: Capture) -> None:
        self.program = program
        self._sizes = sizes
        self._cache = _Cache[tuple[int, int, int]](name, capture)
        self._pages: Sequence[Tensor] | None = None  # graphs hold their addresses

    @property
    def num_graphs(self) -> int:
        return len(self._cache)

    def __call__(
        self, x: Tensor, positions: Tensor, slots: Tensor, block_table: Tensor, pages: Sequence[Tensor]
    ) -> Tensor:
        """x [B, T] ids or [B, T, D] states; positions, slots [B, T]; block_table [B, M]; → [B, T, D or E], a copy."""
        (batch, width), num_blocks = positions.shape, block_table.shape[1]
        bucket = self._sizes.bucket(batch, width, num_blocks)
        if bucket is None:
            return self.program(x, positions, slots, block_table, pages)
        self._pages = self._pages or pages
        assert self._pages is pages, "graphs were recorded over other pages"
        rows, blocks = bucket

        def make_inputs() -> tuple[Tensor, ...]:
            tokens = positions.new_full((rows, width), -1), slots.new_zeros(rows, width)
            return x.new_zeros(rows, *x.shape[1:]), *tokens, block_table.new_zeros(rows, blocks)

        graph = self._cache.get((rows, width, blocks), lambda *inputs: self.program(*inputs, pages), make_inputs)
        for static, given, padding in zip(graph.inputs, (x, positions, slots), (0, -1, 0)):
            _fill(static, given, padding)
        table = graph.inputs[3]
        _fill(table[:, :num_blocks], block_table, 0)
        if num_blocks < blocks:
            table[:, num_blocks:] = table[:, :1]
        graph.replay()
        return graph.output[:batch].clone()


class FlatGraphs:
    """An exit or an unembedding over single tokens, called as the program itself; `program` is the program."""

    def __init__(self, name: str, program: Program, max_tokens: int, capture: Capture) -> None:
        self.program = program
        self._max_tokens = max_tokens
        self._cache = _Cache[int](name, capture)

    @property
    def num_graphs(self) -> int:
        return len(self._cache)

    def __call__(self, states: Tensor) -> Tensor:
        """[N, D or E] → [N, E or V], a copy."""
        num_tokens = len(states)
        if num_tokens > self._max_tokens:
            return self.program(states)
        bucket = min(_power_of_two(num_tokens), self._max_tokens)
        graph = self._cache.get(bucket, self.program, lambda: (states.new_zeros(bucket, *states.shape[1:]),))
        _fill(graph.inputs[0], states, 0)
        graph.replay()
        return graph.output[:num_tokens].clone()


def with_graphs(
    programs: Mapping[str, Program],
    infos: Mapping[str, ProgramInfo],
    manifest: Manifest,
    max_num_seqs: int,
    capture: Capture,
    bitwise: bool = True,
) -> dict[str, Program]:
    """Every program behind its graphs, which are recorded when a bucket is first met.

    With `bitwise` no bucket is larger than the range in which a token's results have the same bits.
    """
    limits = manifest.limits
    graphed = dict[str, Program]()
    for name, program in programs.items():
        info = infos[name]
        most = info.bitwise_range[1] if info.bitwise_range and bitwise else None
        if info.kv_layers:
            sizes = Sizes(
                batch=max_num_seqs,
                width=limits.max_query_len,
                blocks=-(-limits.max_model_len // manifest.block_size),
                tokens=most,
            )
            graphed[name] = PagedGraphs(name, program, sizes, capture)
        else:
            num_tokens = MAX_FLAT_TOKENS if most is None else min(MAX_FLAT_TOKENS, most)
            graphed[name] = FlatGraphs(name, program, num_tokens, capture)
    return graphed


def without_graphs(program: Program) -> Program:
    """The program itself: prefill's chunks are long, and have more shapes than graphs are worth."""
    return program.program if isinstance(program, PagedGraphs | FlatGraphs) else program


def _fill(static: Tensor, given: Tensor, padding: int) -> None:
    """`given` [n, ..] into the first rows of `static` [≥ n, ..], and `padding` into the rest, which an earlier and
    larger call has left full."""
    static[: len(given)] = given
    if len(given) < len(static):
        static[len(given) :] = padding


def _power_of_two(number: int) -> int:
    """The least power of two that is not below `number` ≥ 1."""
    return 1 << (number - 1).bit_length()
