"""Graphs without CUDA: a stand-in for the capture runs the program on the static tensors, and spoils all that a real
replay may spoil. With `--device cuda` the same tests run with real captures too."""

import functools
import random
import zipfile
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import infer.backends.inductor
from infer import cuda_graphs
from infer.artifact import Artifact, ProgramSet
from infer.batch import make_query
from infer.cuda_graphs import CaptureError, CudaCapture, FlatGraphs, PagedGraphs, Sizes
from infer.manifest import BuildInfo, ProgramInfo
from infer.params import SamplingParams
from infer.row import Row
from infer.runner import Runner
from infer.strategy import Policy
from tests.tiny_engine import BLOCK_SIZE, DEVICE, IN_PLACE, PROMPTS, Tiny, model_of, oracle

SIZES = Sizes(batch=6, width=8, blocks=16, tokens=None)
NUM_BLOCKS, DIM = 100, 3
CAPTURES = ["stand-in", pytest.param("cuda", marks=pytest.mark.gpu)]


class Spoiling:
    """A capture that runs the program itself, and leaves garbage wherever nothing may be counted on.

    The results of all graphs share one pool on a GPU: so a replay destroys every result but its own.
    """

    def __init__(self) -> None:
        self.outputs: list[Tensor] = []

    def __call__(self, run):
        output = run().clone()
        self.outputs.append(output)

        def replay() -> None:
            result = run()
            for other in self.outputs:
                other.fill_(torch.nan)
            output.copy_(result)

        return replay, output


@pytest.fixture(params=CAPTURES)
def capture(request: pytest.FixtureRequest) -> Spoiling | CudaCapture:
    return Spoiling() if request.param == "stand-in" else CudaCapture()


def spoil_inputs(graphs: PagedGraphs | FlatGraphs) -> None:
    """As if another call had left its states, and ids, positions and slots that a row could have."""
    for graph in graphs._cache._graphs.values():
        for tensor in graph.inputs:
            tensor.fill_(torch.nan if tensor.is_floating_point() else BLOCK_SIZE + 1)


def attend(x, positions, slots, block_table, pages):
    """One layer of a program over pages in plain words: write x, then sum all cached x at positions ≤ one's own.

    Masked slots are multiplied by 0, as softmax does, so that NaN in a block that is read comes through.
    """
    (page,) = pages
    page.view(-1, DIM)[slots] = x
    cached = page[block_table].flatten(1, 2)  # [B, M·S, D]
    seen = torch.arange(cached.shape[1], device=x.device) <= positions.clamp(min=0).unsqueeze(2)  # [B, T, M·S]
    return torch.stack([(keys.unsqueeze(0) * mask.unsqueeze(2)).sum(1) for keys, mask in zip(cached, seen)])


def flat(states: Tensor) -> Tensor:
    return torch.stack([state * 2 for state in states])


def random_call(generator: random.Random):
    """(x, positions, slots, block_table) of up to 7 rows and 9 positions: some calls are too large for a graph."""
    free = generator.sample(range(1, NUM_BLOCKS), NUM_BLOCKS - 1)
    rows, spans = [], []
    for _ in range(generator.randint(1, 7)):
        start, length = generator.randint(0, 40), generator.randint(1, 9)
        blocks = [free.pop() for _ in range(-(-(start + length) // BLOCK_SIZE))]
        rows.append(Row(range(60), SamplingParams(), seed=0, max_len=99, num_tiers=1, num_stages=1,
                        blocks=blocks, ring=1))  # fmt: skip
        spans.append(range(start, start + length))
    query = make_query(rows, spans, BLOCK_SIZE, DEVICE)
    numbers = [generator.randint(-99, 99) for _ in range(query.positions.numel() * DIM)]
    x = torch.tensor(numbers, dtype=torch.float64, device=DEVICE)  # whole numbers, whose sums are exact
    x = x.view(*query.positions.shape, DIM)
    return x, query.positions, query.slots, query.block_table


def pages_of(generator: random.Random) -> list[Tensor]:
    numbers = [generator.randint(-99, 99) for _ in range(NUM_BLOCKS * BLOCK_SIZE * DIM)]
    return [torch.tensor(numbers, dtype=torch.float64, device=DEVICE).view(NUM_BLOCKS, BLOCK_SIZE, DIM)]


# ---- buckets ----


@given(
    batch=st.integers(1, 20), width=st.integers(1, 12), blocks=st.integers(1, 20),
    most=st.integers(1, 20), tokens=st.none() | st.integers(1, 60),
)  # fmt: skip
def test_a_bucket_holds_the_call_and_stays_within_every_limit(batch, width, blocks, most, tokens):
    sizes = Sizes(batch=most, width=8, blocks=15, tokens=tokens)
    bucket = sizes.bucket(batch, width, blocks)
    fits = batch <= most and width <= 8 and blocks <= 15 and (tokens is None or batch * width <= tokens)
    assert (bucket is not None) == fits
    if bucket is not None:
        assert batch <= bucket[0] <= most and bucket[0] < 2 * batch
        assert blocks <= bucket[1] <= 15 and bucket[1] <= max(8, 2 * blocks)
        assert tokens is None or bucket[0] * width <= tokens
        assert sizes.bucket(bucket[0], width, bucket[1]) == bucket


def test_batches_and_tables_of_any_size_need_few_buckets():
    sizes = Sizes(batch=12, width=8, blocks=100, tokens=None)
    buckets = {sizes.bucket(batch, 1, blocks) for batch in range(1, 13) for blocks in range(1, 101)}
    assert buckets == {(b, m) for b in (1, 2, 4, 8, 12) for m in (8, 16, 32, 64, 100)}


# ---- one program ----


@pytest.mark.parametrize("tokens", [None, 20])
def test_results_and_pages_are_those_of_the_program_whatever_stood_in_the_buffers(tokens, capture):
    generator = random.Random(0)
    pages = pages_of(generator)
    others = [pages[0].clone()]
    sizes = Sizes(batch=6, width=8, blocks=16, tokens=tokens)
    graphs = PagedGraphs("trunk", attend, sizes, capture)
    num_replayed = 0
    for _ in range(300):
        call = random_call(generator)
        want = attend(*call, others)
        got = graphs(*call, pages)
        real = call[1] >= 0
        assert torch.equal(got[real], want[real])
        assert torch.equal(pages[0][1:], others[0][1:])  # the null block may hold what it will
        num_replayed += sizes.bucket(*call[1].shape, call[3].shape[1]) is not None
        spoil_inputs(graphs)
    assert 50 < num_replayed < 300
    assert graphs.num_graphs <= 8 * 4 * 2  # T, B', M'


def test_nan_in_the_null_block_or_in_a_row_reaches_no_other_row(capture):
    generator = random.Random(1)
    pages = pages_of(generator)
    others = [pages[0].clone()]
    graphs = PagedGraphs("trunk", attend, SIZES, capture)
    for _ in range(100):
        call = random_call(generator)
        broken = generator.randrange(len(call[0]))
        call[0][broken] = torch.nan
        for page in (pages[0], others[0]):
            page[0] = torch.nan
        want, got = attend(*call, others), graphs(*call, pages)
        assert got.isnan().any(dim=2)[broken][call[1][broken] >= 0].all()
        for b in range(len(call[0])):
            real = call[1][b] >= 0
            assert b == broken or (torch.equal(got[b][real], want[b][real]) and got[b][real].isfinite().all())
        for page in (pages[0], others[0]):
            page[call[3][broken]] = 0  # what the engine does with the blocks of a row that failed
        assert torch.equal(pages[0][1:], others[0][1:]) and pages[0][1:].isfinite().all()


def test_tokens_without_pages_are_padded_and_dropped(capture):
    graphs = FlatGraphs("unembed", flat, 12, capture)
    for num_tokens in (*range(1, 20), 3, 12, 7):
        states = torch.randn(num_tokens, 5, device=DEVICE)
        assert torch.equal(graphs(states), flat(states))
        spoil_inputs(graphs)
    assert graphs.num_graphs == 5  # 1, 2, 4, 8, 12


def test_a_result_stays_when_its_graph_or_another_runs_again(capture):
    graphs, other = FlatGraphs("unembed", flat, 8, capture), FlatGraphs("exit", flat, 8, capture)
    states = torch.randn(3, 5, device=DEVICE)
    first = graphs(states)
    graphs(torch.randn(4, 5, device=DEVICE))
    other(torch.randn(3, 5, device=DEVICE))
    assert torch.equal(first, flat(states))

    generator = random.Random(2)
    pages = pages_of(generator)
    trunk = PagedGraphs("trunk", attend, SIZES, capture)
    calls = [random_call(generator) for _ in range(6)]
    results = [trunk(*call, pages) for call in calls]
    copies = [result.clone() for result in results]
    for call in calls:
        trunk(*call, pages)
    assert trunk.num_graphs > 1
    assert all(torch.equal(result, copy) for result, copy in zip(results, copies, strict=True))


def test_the_graph_that_was_not_used_for_longest_makes_way(monkeypatch):
    monkeypatch.setattr(cuda_graphs, "MAX_GRAPHS", 3)
    capture = Spoiling()
    graphs = FlatGraphs("unembed", flat, 64, capture)
    for num_tokens in (1, 2, 4, 1, 8, 1, 4):  # 8 drives 2 out
        graphs(torch.randn(num_tokens, 5))
    assert len(capture.outputs) == 4
    assert graphs.num_graphs == 3
    states = torch.randn(2, 5)
    assert torch.equal(graphs(states), flat(states))
    assert len(capture.outputs) == 5


def test_a_program_that_cannot_be_recorded_says_how_to_do_without():
    def fail(run):
        raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(CaptureError, match=r"intermediate.exit.*bucket 4.*not permitted.*enforce_eager=True") as raised:
        FlatGraphs("intermediate.exit", flat, 8, fail)(torch.randn(3, 5))
    assert isinstance(raised.value.__cause__, RuntimeError)


# ---- the runner ----


def recorded(monkeypatch, tiny: Tiny, prompts, params):
    """What `generate` gives, and the logits of every judgement."""
    logits, compute = [], Runner.logits

    def noting(self, tier, states):
        out = compute(self, tier, states)
        logits.append(out.clone())
        return out

    with monkeypatch.context() as patch:
        patch.setattr(Runner, "logits", noting)
        tokens = [r.token_ids for r in tiny.generate(prompts, params)]
    return tokens, logits


def widen_tables(runner: Runner) -> None:
    """Let calls of decoding read as many masked blocks as the buckets do: with tiny heads the sums' order on CPU
    depends on their number (for real models export measures that it does not)."""

    def query(rows, spans):
        made = Runner._query(runner, rows, spans)
        table = made.block_table
        wide = max(8, 1 << (table.shape[1] - 1).bit_length())
        return replace(made, block_table=torch.cat([table, table[:, :1].expand(-1, wide - table.shape[1])], 1))

    runner._query = query


@functools.cache
def products_are_exact() -> bool:
    """Whether a row of a product has the same bits beside up to 14 others; not MKL's in float32 on AMD's."""
    draw = torch.Generator().manual_seed(0)
    weights = [layer.weight for layer in model_of().base.modules() if isinstance(layer, torch.nn.Linear)]
    for weight in {tuple(weight.shape): weight for weight in weights}.values():
        x = torch.randn(15, weight.shape[1], generator=draw).to(weight)
        alone = torch.cat([F.linear(one.repeat(2, 1), weight)[:1] for one in x.split(1)])
        if not all(torch.equal(F.linear(x[:n], weight), alone[:n]) for n in range(2, 16)):
            return False
    return True


def same(got: Tensor, want: Tensor) -> bool:
    return torch.equal(got, want) if products_are_exact() else torch.allclose(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("strategy", "bitwise_range"), [*((strategy, (2, 15)) for strategy in IN_PLACE), ("hispec", (2, 6))]
)
def test_an_engine_with_graphs_gives_the_bits_of_one_without(strategy, bitwise_range, monkeypatch):
    """Within the range in which fp32 has the same bits; a narrow one cuts calls, whose parts are held together."""
    capture = Spoiling()
    policy = Policy(num_draft_tokens=3, window=3)
    plain = Tiny(model_of(), strategy, policy, bitwise_range=bitwise_range)
    widen_tables(plain.runner)
    graphed = Tiny(model_of(), strategy, policy, bitwise_range=bitwise_range, capture=capture)
    generator = random.Random(0)
    for num_prompts in (1, 3, 5):
        prompts = generator.sample(PROMPTS, num_prompts)
        each = [
            SamplingParams(temperature=generator.choice([0, 0.9]), seed=3, max_tokens=generator.randint(1, 9))
            for _ in prompts
        ]
        want, want_logits = recorded(monkeypatch, plain, prompts, each)
        got, got_logits = recorded(monkeypatch, graphed, prompts, each)
        assert got == want
        assert len(got_logits) == len(want_logits)
        assert all(same(g, w) for g, w in zip(got_logits, want_logits, strict=True))
    assert capture.outputs


def test_a_second_run_records_nothing_new():
    capture = Spoiling()
    tiny = Tiny(model_of(), "hispec", bitwise_range=(2, 15), capture=capture)
    params = SamplingParams(temperature=0, max_tokens=12)
    num_captures = []
    for _ in range(2):
        assert [r.token_ids for r in tiny.generate(PROMPTS[:4], params)] == [
            oracle("llama", p, 12) for p in PROMPTS[:4]
        ]
        num_captures.append(len(capture.outputs))
    assert num_captures[0] == num_captures[1] > 0


def test_preempted_rows_go_on_with_the_same_tokens():
    tiny = Tiny(model_of(), "hispec", num_blocks=13, bitwise_range=(2, 15), capture=Spoiling())
    got = tiny.generate(PROMPTS[:4], SamplingParams(temperature=0, max_tokens=14))
    assert [r.token_ids for r in got] == [oracle("llama", p, 14) for p in PROMPTS[:4]]
    assert tiny.engine.num_preemptions > 0


def test_graphs_survive_another_binding_of_the_programs():
    tiny = Tiny(model_of(), "hispec", bitwise_range=(2, 15), capture=Spoiling())
    params = SamplingParams(temperature=0, max_tokens=6)
    want = [r.token_ids for r in tiny.generate(PROMPTS[:3], params)]
    tiny.runner.bind(tiny.runner.programs, bitwise=True)
    got = tiny.generate(PROMPTS[:3], params)
    assert [r.token_ids for r in got] == want and all(r.finish_reason == "length" for r in got)


def test_prefill_records_nothing():
    capture = Spoiling()
    tiny = Tiny(model_of(), "hispec", capture=capture)
    request = tiny.request(PROMPTS[2], SamplingParams(temperature=0, max_tokens=4))
    tiny.engine.add(request)
    tiny.engine._admit()
    tiny.engine._prefill()
    assert request.row is not None and request.row.cursors[-1] > 0
    assert not capture.outputs
    tiny.drain()
    assert capture.outputs


def test_packages_for_cuda_are_loaded_without_locks_between_threads(monkeypatch, tmp_path):
    loaded = {}
    monkeypatch.setattr(
        "torch._inductor.aoti_load_package",
        lambda path, run_single_threaded: loaded.update({path: run_single_threaded}),
    )
    monkeypatch.setattr("infer.backends.inductor.check_package", lambda path, program: None)
    for device in ("cpu", "cuda"):
        with zipfile.ZipFile(tmp_path / f"{device}.pt2", "w"):
            pass
        info = ProgramInfo(file=f"{device}.pt2", kv_layers=[], bitwise_range=None, num_kernels={})
        build = BuildInfo(
            backend="inductor", device=device, dtype="float32", torch_version="", machine="", cpu_capability="",
            num_threads=1, programs={"unembed": info},
        )  # fmt: skip
        infer.backends.inductor.load_programs(Artifact(tmp_path, None), ProgramSet(tmp_path, build))
    assert loaded == {str(tmp_path / "cpu.pt2"): False, str(tmp_path / "cuda.pt2"): True}
