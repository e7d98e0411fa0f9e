"""From a set of programs to an engine that runs them: pages and pool are sized, programs bound, CUDA graphs made.

Knows neither tokenizer nor prompts, and not which strategy is best.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from infer import backends
from infer.artifact import JUST_IN_TIME, Artifact, ProgramSet
from infer.blocks import BlockPool
from infer.cuda_graphs import CudaCapture, with_graphs
from infer.draft_vocab import read_draft_vocabs
from infer.engine import Engine
from infer.engine_options import EngineOptions
from infer.plan import Conditions
from infer.pool_size import default_num_blocks
from infer.prefix_cache import PrefixCache
from infer.repertoire import Repertoire
from infer.round_maker import make_round
from infer.runner import Program, Runner
from infer.strategy import Setting


class EngineLoader:
    """
    Args:
        program_set: of the artifact, as its `select` chose it.
        programs: those of the set, loaded before; None: they are loaded with the engine.
    """

    def __init__(
        self,
        artifact: Artifact,
        program_set: ProgramSet,
        options: EngineOptions,
        programs: Mapping[str, Program] | None = None,
    ) -> None:
        self._artifact, self._manifest = artifact, artifact.manifest
        self._set, self._build = program_set, program_set.build
        self._options = options
        self._programs = programs
        is_captured = self._build.device == "cuda" and self._build.backend in backends.CAPTURED
        self._has_graphs = is_captured and not options.enforce_eager

    def conditions(self, verification: str) -> Conditions:
        """What a plan that holds here was measured under."""
        return Conditions.here(
            self._artifact,
            self._build,
            bitwise=self._options.bitwise,
            cuda_graphs=self._has_graphs,
            verification=verification,
        )

    def load(self, repertoire: Repertoire, settings: Sequence[Setting], verification: str) -> Engine:
        """An engine that runs the first of these strategies, with room for all of them."""
        options, manifest, device = self._options, self._manifest, self._build.device
        draft_vocabs = read_draft_vocabs(self._artifact, device)
        if self._programs is None:
            self._programs = backends.load(self._artifact, self._set)
        num_blocks = self._num_blocks(repertoire, settings)
        runner = Runner(
            manifest,
            self.programs(options.bitwise),
            self._build.programs,
            draft_vocabs,
            num_blocks=num_blocks,
            max_num_seqs=options.max_num_seqs,
            dtype=getattr(torch, self._build.dtype),
            device=torch.device(device),
            bitwise=options.bitwise,
            slot_gaps=self._build.slot_gaps,
        )
        pool = BlockPool(num_blocks, manifest.block_size)
        cache = PrefixCache(pool, runner.prefill_chunk) if options.enable_prefix_caching else None
        first = make_round(runner, *repertoire.parts(settings[0], verification))
        return Engine(runner, first, pool, options.max_num_seqs, options.max_num_prefill_tokens, cache)

    def programs(self, bitwise: bool) -> Mapping[str, Program]:
        """The loaded programs as they are called: on CUDA behind graphs."""
        assert self._programs is not None, "programs are loaded with the engine"
        if not self._has_graphs:
            return self._programs
        # branches make more rows of a call than there are sequences
        most = self._manifest.limits.max_batch
        return with_graphs(self._programs, self._build.programs, self._manifest, most, CudaCapture(), bitwise)

    def unproved_bits(self) -> Iterator[str]:
        """Why the last bits of these programs may not be what `bitwise` promises here, in words."""
        build = self._build
        if build.device == "cpu" and build.num_threads != torch.get_num_threads():
            yield (
                f"{build.folder_name} was measured with {build.num_threads} threads and runs with "
                f"{torch.get_num_threads()}: identity of the last bits is not proved there; call "
                f"torch.set_num_threads({build.num_threads}), or export again"
            )
        if unproved := build.unproved():
            yield (
                f"{build.folder_name} was measured elsewhere ({'; '.join(unproved)}): identity of the last bits is not "
                "proved here; export again to have it measured"
            )
        if build.backend == JUST_IN_TIME and self._options.bitwise:
            yield (
                "backend='compile': in which calls such programs give a token the same bits is measured by nobody, so "
                "a strategy may take another token than plain decoding where two logits lie within the last bits of "
                "each other; bitwise=False says the same and silences this, backend='inductor' has it measured"
            )

    def _num_blocks(self, repertoire: Repertoire, settings: Sequence[Setting]) -> int:
        if self._options.num_blocks is not None:
            return self._options.num_blocks
        num_scored, num_scratch_blocks = repertoire.row_needs(settings)
        return default_num_blocks(
            self._manifest,
            getattr(torch, self._build.dtype).itemsize,
            self._options.max_num_seqs,
            device=self._build.device,
            gpu_memory_utilization=self._options.gpu_memory_utilization,
            num_scored=num_scored,
            num_scratch_blocks=num_scratch_blocks,
        )
