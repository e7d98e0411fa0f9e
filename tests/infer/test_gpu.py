"""What only a GPU can show: `pytest --device cuda tests/infer/test_gpu.py`. Written without one, so never run yet.

The rest of the suite runs there too; here stand real captures, compiled packages, memory and host synchronisations.
"""

import warnings
from pathlib import Path

import pytest
import torch

from infer import LLM, SamplingParams
from infer.cuda_graphs import CudaCapture, FlatGraphs, PagedGraphs, without_graphs
from infer.pool_size import default_num_blocks
from infer.strategy import Policy
from tests.tiny_artifact import load, make_artifact
from tests.tiny_engine import NAN_ID, PROMPTS, STRATEGIES, Tiny, make_manifest, model_of, nan_model, oracle

pytestmark = pytest.mark.gpu

TEXTS = ["Hello", "the river and the sea", "A", "stones by the river"]
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.9, top_p=0.9, seed=3, max_tokens=20, ignore_eos=True)
MIB = 1 << 20


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Exported for CUDA by both backends, with the checks that export itself makes."""
    return make_artifact(tmp_path_factory.mktemp("gpu") / "artifact", ("eager", "inductor"))


def tokens_of(llm: LLM, params: SamplingParams) -> list[tuple[int, ...]]:
    return [output.outputs[0].token_ids for output in llm.generate(TEXTS, params)]


def graphs_of(llm: LLM) -> list[PagedGraphs | FlatGraphs]:
    runner = llm.engine.runner
    programs = [program for program, *_ in (*runner._trunks, *runner._exits, *runner._unembeds)]
    return [program for program in programs if isinstance(program, PagedGraphs | FlatGraphs)]


@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_graphs_change_no_token_and_are_recorded_once(artifact: Path, strategy: str, backend: str) -> None:
    plain = load(artifact, strategy, backend=backend, enforce_eager=True)
    graphed = load(artifact, strategy, backend=backend)
    assert not graphs_of(plain)
    for params in (GREEDY, SAMPLED):
        assert tokens_of(graphed, params) == tokens_of(plain, params)
    num_graphs = [graphs.num_graphs for graphs in graphs_of(graphed)]
    assert sum(num_graphs) > 0
    assert tokens_of(graphed, SAMPLED) == tokens_of(plain, SAMPLED)
    assert [graphs.num_graphs for graphs in graphs_of(graphed)] == num_graphs


@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_every_strategy_gives_plain_decodings_tokens(artifact: Path, params: SamplingParams, backend: str) -> None:
    llm = load(artifact, "autoregressive", backend=backend)
    plain = tokens_of(llm, params)
    for strategy in STRATEGIES[1:]:
        for policy in (Policy(), Policy(num_draft_tokens=4, window=6)):
            llm.use(strategy, policy)
            assert tokens_of(llm, params) == plain


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_tokens_are_those_of_hugging_face(strategy: str) -> None:
    tiny = Tiny(model_of(), strategy, capture=CudaCapture())
    got = tiny.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=14))
    assert [request.token_ids for request in got] == [oracle("llama", prompt, 14) for prompt in PROMPTS]


def test_a_row_of_nan_ends_alone() -> None:
    model, texts = nan_model()
    tiny = Tiny(model, "hispec", capture=CudaCapture())
    requests = tiny.generate(list(texts), SamplingParams(temperature=0, max_tokens=14))
    for prompt, request in zip(texts, requests, strict=True):
        if NAN_ID in prompt:
            assert request.finish_reason == "error"
        else:
            assert request.token_ids == texts[prompt][len(prompt) :]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_preempted_rows_go_on_with_the_same_tokens(artifact: Path, strategy: str) -> None:
    wide, narrow = load(artifact, strategy), load(artifact, strategy, num_blocks=17)
    for params in (GREEDY, SAMPLED):
        assert tokens_of(narrow, params) == tokens_of(wide, params)
    assert narrow.engine.num_preemptions > 0


def test_the_pool_leaves_free_what_is_not_its_share() -> None:
    manifest = make_manifest(model_of(), max_model_len=10_000_000)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    utilization = (total - free + 512 * MIB) / total
    options = {"device": "cuda", "gpu_memory_utilization": utilization, "num_scored": 1}
    with pytest.raises(ValueError, match="gpu_memory_utilization"):
        default_num_blocks(manifest, 4, 1, **options)
    manifest = make_manifest(model_of(), max_model_len=1000)
    num_blocks = default_num_blocks(manifest, 4, 1_000, **options)
    shape = (num_blocks, manifest.block_size, manifest.base.num_kv_heads, manifest.base.head_dim)
    pages = [torch.empty(shape, device="cuda") for _ in range(2 * manifest.num_kv_layers)]
    left = torch.cuda.mem_get_info()[0]
    assert sum(page.nbytes for page in pages) > 256 * MIB
    assert left >= (1 - utilization) * total - 64 * MIB  # the allocator rounds each tensor up to 2 MiB


def test_a_share_below_what_is_in_use_is_refused(artifact: Path) -> None:
    with pytest.raises(ValueError, match=r"gpu_memory_utilization=1e-06.*in use"):
        load(artifact, gpu_memory_utilization=1e-6)


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_a_judgement_makes_the_host_wait_once(artifact: Path, backend: str) -> None:
    """For its picks; every other transfer goes by pinned memory."""
    llm = load(artifact, "autoregressive", backend=backend)
    tokens_of(llm, GREEDY)  # records the graphs
    for text in TEXTS:
        llm.engine.add(llm.make_request(text, GREEDY))
    for _ in range(2):
        llm.engine.step()  # prefill, and what is made once for a batch
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            llm.engine.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    syncs = [str(warning.message) for warning in caught if "synchroniz" in str(warning.message)]
    assert len(syncs) == 1, syncs
    while llm.engine.has_unfinished:
        llm.engine.step()


def test_prefill_runs_the_programs_themselves(artifact: Path) -> None:
    llm = load(artifact, "hispec")
    llm.engine.add(llm.make_request([5] * 40, GREEDY))
    llm.engine._admit()
    llm.engine._prefill()
    assert all(graphs.num_graphs == 0 for graphs in graphs_of(llm))
    assert all(without_graphs(graphs) is graphs.program for graphs in graphs_of(llm))
    while llm.engine.has_unfinished:
        llm.engine.step()
    assert any(graphs.num_graphs for graphs in graphs_of(llm))
