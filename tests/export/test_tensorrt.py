"""The TensorRT backend, as far as it can be held to anything without a GPU: the shapes that it promises, what it calls,
what it refuses, and that a loaded engine is called with the right memory. The rest is marked."""

import platform
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.export import ExportedProgram

import export  # noqa: F401  sets MKL's mode before MKL starts
from export import bitwise
from export.backends import tensorrt
from export.backends.backend import BuildJob
from export.disk import check_space
from export.graphs import Graphs
from export.onnx_models import write_models
from export.programs import Program, export_program, make_programs
from export.shape_profile import MAX_ELEMENTS, ShapeRange, paged_extents, shape_ranges, tokens_extent
from export.writer import ExportOptions, write_artifact
from infer import LLM, SamplingParams, backends
from infer.artifact import AUTO_ORDER, Artifact, ProgramSet
from infer.backends.tensorrt import load_programs
from infer.manifest import BuildInfo, Limits, ProgramInfo
from tests.export import fake_tensorrt
from tests.export.test_functional import rectangle
from tests.export.tiny_exits import make_early_exit
from train.heads import ExitConfig
from train.model import EarlyExitModel

BLOCK = 4
LIMITS = Limits(max_model_len=64, prefill_chunk=8, max_query_len=16, max_batch=8)
HERE: dict[str, Any] = {"gpu_name": "NVIDIA H100", "cpu_capability": "sm_90",
                        "versions": {"tensorrt": fake_tensorrt.VERSION}}  # fmt: skip


@cache
def model() -> EarlyExitModel:
    exits = [ExitConfig(name="draft", layer=1, head="layer", vocab_size=32)]
    return make_early_exit("llama", exits, num_hidden_layers=2)


@cache
def programs(form: Any) -> dict[str, Program]:
    return {p.name: p for p in make_programs(model(), BLOCK, form)}


@cache
def exported(name: str) -> ExportedProgram:
    """Of the functional form."""
    return export_program(programs("functional")[name])


@pytest.fixture
def job(tmp_path: Path) -> BuildJob:
    """The lowest trunk and the trimmed unembedding."""
    names, graphs = ["draft.trunk", "draft.unembed"], Graphs(tmp_path / "graphs")
    for name in names:
        graphs.write(name, "functional", exported(name))
    (tmp_path / "out").mkdir()
    return BuildJob(
        names=names, graphs=graphs, folder=tmp_path / "out", weights=tmp_path / "weights", device="cpu",
        dtype="float32", limits=LIMITS, autotune=False, num_threads=1, num_workers=1, cache=None,
        report=lambda line: None,
    )  # fmt: skip


def build_info(**changes: Any) -> BuildInfo:
    infos = {
        p.name: ProgramInfo(
            file=f"{p.name}.engine", kv_layers=list(p.kv_layers), bitwise_range=None, num_kernels={}
        )
        for p in programs("functional").values()
    }  # fmt: skip
    here = BuildInfo(
        backend="tensorrt", device="cuda", dtype="float32", torch_version=torch.__version__, machine=platform.machine(),
        num_threads=1, programs=infos, **HERE,
    )  # fmt: skip
    return replace(here, **changes)


# ---- shapes ----


def test_every_input_of_every_program_has_a_range_around_its_example() -> None:
    for program in programs("functional").values():
        ranges = shape_ranges(exported(program.name), LIMITS)
        examples = [t for group in program.inputs for t in (group if isinstance(group, list) else [group])]
        assert len(ranges) == len(examples)
        for found, example in zip(ranges, examples, strict=True):
            assert found.dtype == example.dtype
            assert len(found.least) == len(found.usual) == len(found.most) == example.dim()
            for least, usual, size, most in zip(found.least, found.usual, example.shape, found.most, strict=True):
                assert least <= usual <= most and (least == most == size or least <= size <= most)


def test_extents_are_those_of_the_limits() -> None:
    limits = Limits(max_model_len=4096, prefill_chunk=128, max_query_len=64, max_batch=256)
    assert paged_extents(limits, (16, 3, 64)) == {
        "B": (1, 1, 256), "T": (1, 4, 128), "M": (1, 128, 256), "num_blocks": (1, 257, 1 + 256 * 256),
    }  # fmt: skip
    assert tokens_extent(limits, 49152) == (1, 4, 256 * 64)


def test_no_tensor_is_larger_than_tensorrt_takes() -> None:
    limits = Limits(max_model_len=131072, prefill_chunk=128, max_query_len=64, max_batch=256)
    most = paged_extents(limits, (16, 8, 128))["num_blocks"].most
    assert 0 <= MAX_ELEMENTS - most * 16 * 8 * 128 < 16 * 8 * 128
    assert 0 <= MAX_ELEMENTS - tokens_extent(limits, 262144).most * 262144 < 262144


@pytest.mark.parametrize("size", [1, 4, 16, 128])
def test_the_gate_asks_for_no_shape_outside(size: int) -> None:
    """Limits may be short, while `paged_range` always tries the same calls."""
    extents = paged_extents(replace(LIMITS, max_model_len=size + 1), (size, 1, 1))
    seen = {"B": 0, "T": 0, "M": 0, "num_blocks": 0}

    def program(x: Any, positions: Any, slots: Any, table: Any, kv: Any) -> torch.Tensor:
        for name, count in zip(seen, (*positions.shape, table.shape[1], len(kv[0])), strict=True):
            seen[name] = max(seen[name], count)
        return torch.zeros(*positions.shape, 1)

    tokens = torch.zeros(bitwise.MAX_TOKENS, bitwise.MAX_TOKENS, dtype=torch.long)
    assert bitwise.paged_range(program, tokens, (size, 1, 1), 1, torch.float32) == (1, 64)
    widest = bitwise.widest_call(size)
    assert tuple(seen.values()) == (widest.rows, widest.length, widest.blocks_per_row, widest.num_blocks)
    assert all(count <= extents[name].most for name, count in seen.items()), (seen, extents)


def test_the_command_names_the_models_inputs_and_shapes(job: BuildJob) -> None:
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    command = tensorrt.trtexec_command("draft.trunk", shape_ranges(exported("draft.trunk"), LIMITS))
    rows, pages = "1x1", "1x4x2x12"
    least = f"x:{rows},positions:{rows},slots:{rows},block_table:{rows},k0:{pages},v0:{pages}"
    assert command.startswith(f"trtexec --onnx=draft.trunk.onnx --minShapes={least} --optShapes=x:1x4,positions:1x4,")
    assert "--maxShapes=x:64x64,positions:64x64,slots:64x64,block_table:64x211,k0:" in command
    assert command.endswith(" --saveEngine=draft.trunk.engine")
    write_models(replace(job, names=["draft.trunk"]))
    graph = onnx.load(job.folder / "draft.trunk.onnx", load_external_data=False).graph
    assert [value.name for value in graph.input] == [part.split(":")[0] for part in least.split(",")]


# ---- what is built ----


def test_the_compiler_gets_the_graph_its_shapes_and_our_settings(
    job: BuildJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("onnxscript")
    calls = list[tuple[Any, dict[str, Any]]]()

    def convert(graph: Any, **settings: Any) -> bytes:
        calls.append((graph, settings))
        return b"plan %d" % len(calls)

    fake_tensorrt.install_compiler(monkeypatch, convert)
    assert tensorrt.build(job) == {"draft.trunk": {}, "draft.unembed": {}}
    assert (job.folder / "draft.trunk.engine").read_bytes() == b"plan 1"
    assert (job.folder / "draft.unembed.engine").read_bytes() == b"plan 2"
    names = {f"{name}.{suffix}" for name in job.names for suffix in ("engine", "onnx")}
    assert {file.name for file in job.folder.iterdir()} == names | {"weights.bin", "trtexec.txt"}
    assert len((job.folder / "trtexec.txt").read_text().splitlines()) == 2
    graph, settings = calls[0]
    x, positions, slots, table, pages = settings["arg_inputs"]
    assert len(pages) == 2 and pages[0].max_shape[1:] == (4, 2, 12) and pages[0].dtype == torch.float32
    assert x.dtype == positions.dtype == slots.dtype == table.dtype == torch.int64
    assert (x.min_shape, x.opt_shape, x.max_shape) == ((1, 1), (1, 4), (64, 64))
    # a mask taken for a triangle would attend to the wrong entries; tf32 would fail float32's gate
    assert settings["attn_bias_is_causal"] is False and settings["disable_tf32"] is True
    assert settings["assume_dynamic_shape_support"] is True
    # the loader binds by these names
    assert list(graph.graph_signature.user_inputs) == ["x", "positions", "slots", "block_table", "kv_0", "kv_1"]


def test_what_tensorrt_cant_compile_is_told_with_the_program(job: BuildJob, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensorrt, "write_models", lambda job: None)

    def convert(graph: Any, **settings: Any) -> bytes:
        raise NotImplementedError("no converter for aten.foo")

    fake_tensorrt.install_compiler(monkeypatch, convert)
    with pytest.raises(ValueError, match=r"can't compile draft\.trunk: no converter for aten\.foo.*--backend onnx"):
        tensorrt.build(job)


def test_indices_of_the_functional_form_are_flat() -> None:
    """torch-tensorrt's converter of `index_put` takes others for their static shapes."""
    graph = exported("target.trunk").graph
    puts = [node for node in graph.nodes if "index_put" in str(node.target)]
    assert len(puts) == 2
    assert all(index.meta["val"].dim() == 1 for node in puts for index in node.args[1])


# ---- what is loaded ----


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_tensorrt.install_runtime(monkeypatch)
    monkeypatch.setattr("infer.manifest.package_version", {"tensorrt": fake_tensorrt.VERSION}.get)


@pytest.fixture
def engines(runtime: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ProgramSet:
    """Every program's functional module behind an engine."""
    monkeypatch.setattr(fake_tensorrt, "PLANS", {})
    for name, program in programs("functional").items():
        examples = [t for group in program.inputs for t in (group if isinstance(group, list) else [group])]
        graph = exported(name)
        inputs = {n: t.dtype for n, t in zip(graph.graph_signature.user_inputs, examples, strict=True)}
        outputs = {f"output{i}": torch.float32 for i in range(len(graph.graph_signature.user_outputs))}
        values = {node.name: node.meta["val"] for node in graph.graph.nodes if "val" in node.meta}
        width = values[graph.graph_signature.user_outputs[0]].shape[-1]
        content = name.encode()
        fake_tensorrt.PLANS[content] = fake_tensorrt.Plan(_runner(program), inputs, outputs, width)
        (tmp_path / f"{name}.engine").write_bytes(content)
    return ProgramSet(tmp_path, build_info())


def _runner(program: Program) -> Callable[[list[torch.Tensor]], list[torch.Tensor]]:
    def run(given: list[torch.Tensor]) -> list[torch.Tensor]:
        with torch.no_grad():
            result = program.module(*given[:4], given[4:]) if program.kv_layers else program.module(*given)
        return list(result) if isinstance(result, tuple) else [result]

    return run


def load(engines: ProgramSet) -> dict[str, Callable[..., Any]]:
    return load_programs(Artifact(engines.path, None), engines)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["draft.trunk", "target.trunk", "draft.exit"])
def test_a_loaded_engine_writes_pages_as_the_inplace_program_does(engines: ProgramSet, name: str) -> None:
    program = programs("inplace")[name]
    positions, slots, table = rectangle([3, 6], [5, 2], 5)
    generator = torch.Generator().manual_seed(3)
    if program.inputs[0].dtype == torch.long:
        x = torch.randint(100, (2, 5), generator=generator)
    else:
        x = torch.randn(2, 5, program.inputs[0].shape[-1], generator=generator)
    pages = [torch.randn(16, *p.shape[1:], generator=generator) for p in program.inputs[4]]
    mine = [page.clone() for page in pages]
    with torch.no_grad():
        expected = program.module(x, positions, slots, table, pages)
        got = load(engines)[name](x, positions, slots, table, mine)
    real = positions >= 0
    assert torch.equal(got[real], expected[real])
    for written, wanted in zip(mine, pages, strict=True):
        assert torch.equal(written[1:], wanted[1:])


def test_programs_over_tokens_take_slices_that_begin_anywhere(engines: ProgramSet) -> None:
    states = torch.randn(1 + 4 * 48)[1:].view(4, 48)  # not where TensorRT wants memory to begin
    program = programs("functional")["draft.unembed"]
    assert torch.equal(load(engines)["draft.unembed"](states), program.module(states))


def test_a_shape_outside_the_profile_is_told_with_both(engines: ProgramSet) -> None:
    content = b"draft.unembed"
    fake_tensorrt.PLANS[content] = fake_tensorrt.PLANS[content]._replace(most=50)
    with pytest.raises(ValueError, match=r"states of shape \(51, 48\), built for \(1,\) to \(50,\)"):
        load(engines)["draft.unembed"](torch.randn(51, 48))


def test_a_file_that_tensorrt_cant_read_is_refused(engines: ProgramSet) -> None:
    (engines.path / "target.trunk.engine").write_bytes(b"no plan")
    with pytest.raises(ValueError, match=rf"target\.trunk\.engine: TensorRT {fake_tensorrt.VERSION} can't load it"):
        load(engines)


@pytest.mark.parametrize("other", ["unembed", "target.trunk"])
def test_an_engine_with_other_tensors_is_refused(engines: ProgramSet, other: str) -> None:
    """Two trunks with the same number of layers have the same tensors: that these were swapped nobody can tell."""
    first = engines.path / "draft.trunk.engine"
    plan = fake_tensorrt.PLANS[other.encode()]
    if other == "target.trunk":
        kept = {name: dtype for name, dtype in plan.inputs.items() if name != "kv_1"}
        fake_tensorrt.PLANS[other.encode()] = plan._replace(inputs=kept)
    first.write_bytes(other.encode())
    with pytest.raises(ValueError, match=r"draft\.trunk\.engine: takes .*another program"):
        load(engines)


def test_loading_without_tensorrt_or_a_gpu_is_refused(engines: ProgramSet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ValueError, match="finds no GPU"):
        load(engines)
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    with pytest.raises(ValueError, match=r"needs tensorrt, not installed here: pip install 'hispec\[tensorrt\]'"):
        load(engines)


# ---- where it may run ----


def test_a_plan_of_another_gpu_or_tensorrt_misfits(runtime: None) -> None:
    """C06: newer is no better than older."""
    assert build_info().misfits() == []
    for changes, word in (
        ({"gpu_name": "NVIDIA A100-SXM4-80GB"}, "gpu_name is NVIDIA A100-SXM4-80GB in the artifact, NVIDIA H100 here"),
        ({"cpu_capability": "sm_80"}, "cpu_capability is sm_80"),
        ({"versions": {"tensorrt": "11.1.0.9"}}, "tensorrt is 11.1.0.9"),
        ({"versions": {"tensorrt": "10.16.1.11"}}, "tensorrt is 10.16.1.11"),
    ):
        (line,) = build_info(**changes).misfits()
        assert word in line


def test_a_plan_misfits_where_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert any("no CUDA device" in line for line in build_info().misfits())


def test_auto_takes_it_after_inductor() -> None:
    assert AUTO_ORDER.index("inductor") < AUTO_ORDER.index("tensorrt") < AUTO_ORDER.index("eager")


def test_cpu_is_refused(runtime: None, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_tensorrt.install_compiler(monkeypatch, lambda *_, **__: b"")
    tensorrt.check_available("cuda", ["float32"])
    assert tensorrt.versions() == {"tensorrt": fake_tensorrt.VERSION}
    with pytest.raises(ValueError, match="not for --device cpu: add --device cuda"):
        tensorrt.check_available("cpu", ["float32"])


def test_engines_and_models_take_room_twice(tmp_path: Path) -> None:
    with pytest.raises(ValueError) as error:
        check_space(tmp_path, tmp_path, [10**18], ["tensorrt"])
    assert "about 2000000000.00 GB" in str(error.value)


# ---- with the package ----


@pytest.mark.tensorrt
def test_the_package_takes_our_shapes() -> None:
    import torch_tensorrt

    for program in programs("functional").values():
        for found in shape_ranges(exported(program.name), LIMITS):
            small = ShapeRange(found.dtype, found.least, found.usual, found.usual)
            torch_tensorrt.Input(
                min_shape=small.least, opt_shape=small.usual, max_shape=small.most, dtype=small.dtype
            )  # fmt: skip


@pytest.mark.tensorrt
@pytest.mark.gpu
def test_engines_pass_the_gates_and_give_eagers_tokens(tmp_path: Path) -> None:
    options = ExportOptions(
        output=tmp_path / "artifact", backends=("eager", "tensorrt"), device="cuda", block_size=BLOCK,
        prefill_chunk=8, max_model_len=64,
    )  # fmt: skip
    folder = write_artifact(lambda dtype: model(), None, options)
    opened = Artifact.open(folder)
    assert set(backends.load(opened, opened.select("tensorrt", device="cuda"))) == programs("functional").keys()
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    texts = []
    for backend in ("eager", "tensorrt"):
        llm = LLM(folder, "layerskip", backend=backend, device="cuda", num_blocks=128)
        texts.append([list(out.outputs[0].token_ids) for out in llm.generate([[5, 9, 3], [3] * 17, [1]], params)])
    assert texts[0] == texts[1]
