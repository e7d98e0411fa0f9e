"""The ONNX backend: what an export of it holds, that its models compute the same, and what is refused."""

import dataclasses
import json
import shutil
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import export  # noqa: F401  sets MKL's mode before MKL starts
from export import bitwise
from export.cli import main
from export.onnx_models import LEAST_EXTERNAL
from export.programs import make_programs
from export.writer import ExportOptions, write_artifact
from infer import LLM, SamplingParams, backends
from infer.artifact import Artifact, write_manifest
from infer.backends.onnx import DATA_FILE, check_model
from infer.manifest import Manifest
from tests.export.test_functional import rectangle
from tests.export.tiny_exits import make_early_exit
from tests.tiny_engine import hf_greedy
from train.heads import ExitConfig
from train.model import EarlyExitModel

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
onnxruntime = pytest.importorskip("onnxruntime")

BLOCK = 4
# A family costs about ten seconds of conversion; qwen3 adds norms of q and k to what llama has
FAMILIES = ["llama", *(pytest.param(family, marks=pytest.mark.slow) for family in ("qwen3", "opt"))]
PROMPTS = ([5, 9, 3], [7, 8, 9, 10, 11, 12, 13, 14, 15], [3] * 17, [1], [20, 21, 22, 23], [5, 9] * 4, [2, 90, 31])
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@cache
def model_of(family: str) -> EarlyExitModel:
    """Llama with a trimmed `layer` exit and tied embeddings; the others with as few programs as there can be."""
    if family != "llama":
        return make_early_exit(family, [ExitConfig(name="draft", layer=1)], num_hidden_layers=2)
    exits = [ExitConfig(name="draft", layer=1, head="layer", vocab_size=32)]
    return make_early_exit(family, exits, num_hidden_layers=2, tie_word_embeddings=True)


@pytest.fixture(scope="module")
def artifact_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A family's artifact, exported once: llama's for eager too."""

    @cache
    def make(family: str) -> Path:
        options = ExportOptions(
            output=tmp_path_factory.mktemp("onnx") / family,
            backends=("eager", "onnx") if family == "llama" else ("onnx",),
            block_size=BLOCK,
            prefill_chunk=8,
            max_model_len=64,
        )
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(bitwise, "SHAPES", bitwise.SHAPES[:4])
            return write_artifact(lambda dtype: model_of(family), None, options)

    return make


@pytest.fixture
def copied(artifact_of: Callable[[str], Path], tmp_path: Path) -> Path:
    """Llama's artifact, moved to where a test may spoil it."""
    return shutil.copytree(artifact_of("llama"), tmp_path / "moved" / "artifact")


def folder_of(artifact: Path) -> Path:
    return next((artifact / "programs").glob("onnx-*"))


def answers(llm: LLM, prompts: Any = PROMPTS) -> list[list[int]]:
    return [list(out.outputs[0].token_ids) for out in llm.generate([list(p) for p in prompts], GREEDY)]


# ---- the same numbers ----


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_passes_the_gate_and_has_a_range_of_its_own(
    artifact_of: Callable[[str], Path], family: str
) -> None:
    folder = artifact_of(family)
    report = json.loads((folder / "parity.json").read_text())["programs"][folder_of(folder).name]
    assert all(tier["max_error"] <= 1e-4 and tier["top1_agreement"] == 1.0 for tier in report), report
    build = Artifact.open(folder).select("onnx").build
    assert build.versions == {"onnxruntime": onnxruntime.__version__}
    assert all(program.bitwise_range is not None for program in build.programs.values()), build.programs
    assert all(program.weight_bytes > 0 for program in build.programs.values())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("batch", "length"), [(1, 1), (2, 5), (7, 1), (7, 8), (1, 33)])
def test_any_batch_length_and_past_equals_the_module(
    artifact_of: Callable[[str], Path], family: str, batch: int, length: int
) -> None:
    """C01: batch 1 is where export specialises; the module is the inplace form, so pages must end the same."""
    opened = Artifact.open(artifact_of(family))
    program = next(p for p in make_programs(model_of(family), BLOCK) if p.name == "target.trunk")
    loaded = _target(opened)
    generator = torch.Generator().manual_seed(3)
    for past in (0, 1, 3, 4, 17):
        counts = [max(1, length - b) for b in range(batch)]  # ragged, so that there is padding
        positions, slots, table = rectangle([past + b for b in range(batch)], counts, length)
        shape = (batch, length)
        if program.inputs[0].dtype == torch.long:
            x = torch.randint(100, shape, generator=generator)
        else:
            x = torch.randn(*shape, program.inputs[0].shape[-1], generator=generator)
        pages = [torch.randn(128, *p.shape[1:], generator=generator) for p in program.inputs[4]]
        mine = [page.clone() for page in pages]
        with torch.no_grad():
            expected, got = program.module(x, positions, slots, table, pages), loaded(x, positions, slots, table, mine)
        real = positions >= 0
        scale = float(expected[real].abs().max())
        torch.testing.assert_close(got[real], expected[real], rtol=1e-4, atol=1e-4 * scale)
        for written, wanted in zip(mine, pages):
            torch.testing.assert_close(written[1:], wanted[1:], rtol=1e-4, atol=1e-4)


_loaded: dict[Path, Any] = {}


def _target(opened: Artifact) -> Any:
    if opened.path not in _loaded:
        _loaded[opened.path] = backends.load(opened, opened.select("onnx"))["target.trunk"]
    return _loaded[opened.path]


def test_call_time_does_not_grow_with_the_pool(artifact_of: Callable[[str], Path]) -> None:
    """The pages are bound where they lie; to copy 65536 blocks of them would take ten milliseconds."""
    loaded = _target(Artifact.open(artifact_of("llama")))
    positions, slots, table = rectangle([20], [1], 1)

    def best_time(num_blocks: int) -> float:
        pages = [torch.zeros(num_blocks, BLOCK, 2, 12) for _ in range(2)]
        times = []
        for _ in range(30):
            start = time.perf_counter()
            loaded(torch.ones(1, 1, 48), positions, slots, table, pages)
            times.append(time.perf_counter() - start)
        return min(times)

    small, large = best_time(64), best_time(65536)
    assert large < 4 * small + 0.002, (small, large)


@pytest.mark.parametrize("strategy", ["autoregressive", "layerskip"])
def test_greedy_tokens_are_those_of_eager(artifact_of: Callable[[str], Path], strategy: str) -> None:
    folder = artifact_of("llama")
    mine, theirs = (LLM(folder, strategy, backend=name, num_blocks=128) for name in ("onnx", "eager"))
    assert mine.backend == "onnx"
    assert answers(mine) == answers(theirs)
    for count in (1, 2):
        assert answers(mine, PROMPTS[:count]) == answers(theirs, PROMPTS[:count])


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_those_of_hugging_face(artifact_of: Callable[[str], Path], family: str) -> None:
    llm = LLM(artifact_of(family), "autoregressive", backend="onnx", num_blocks=128)
    assert answers(llm) == [hf_greedy(model_of(family), prompt, GREEDY.max_tokens) for prompt in PROMPTS]


def test_two_engines_of_one_artifact_share_no_pages(artifact_of: Callable[[str], Path]) -> None:
    one, two = (LLM(artifact_of("llama"), "autoregressive", backend="onnx", num_blocks=64) for _ in range(2))
    alone = answers(one, PROMPTS[:2])
    first = one.stream(list(PROMPTS[0]), GREEDY)
    next(first)
    assert answers(two, PROMPTS[1:3]) == answers(
        LLM(artifact_of("llama"), "autoregressive", backend="eager", num_blocks=64), PROMPTS[1:3]
    )
    *_, last = first  # what the other engine has written in between must not show here
    assert list(last.outputs[0].token_ids) == alone[0]


# ---- the folder ----


def test_every_weight_stands_once_and_models_are_small(artifact_of: Callable[[str], Path]) -> None:
    """C07, C08: what limits a model's size is that no large tensor stands in it; ties stay tied."""
    folder = folder_of(artifact_of("llama"))
    model = model_of("llama")
    assert model.base.lm_head.weight is model.base.model.embed_tokens.weight
    tensors = {
        p.data_ptr(): p.numel() * p.element_size() for p in (*model.base.parameters(), *model.heads.parameters())
    }
    trimmed = 32 * model.family.exit_size * 4
    total = (folder / DATA_FILE).stat().st_size
    assert total <= 1.05 * (sum(tensors.values()) + trimmed)
    for file in folder.glob("*.onnx"):
        graph = onnx.load(file, load_external_data=False).graph
        assert all(len(t.raw_data) < LEAST_EXTERNAL for t in graph.initializer), file
        assert not any(node.metadata_props or node.doc_string for node in graph.node)
        assert b"/tests/" not in file.read_bytes() and b"site-packages" not in file.read_bytes()
    assert {file.suffix for file in folder.iterdir()} == {".onnx", ".bin", ".json"}


def test_plain_onnxruntime_runs_a_folder_that_was_moved(copied: Path, tmp_path: Path) -> None:
    folder = shutil.move(folder_of(copied), tmp_path / "elsewhere")
    session = onnxruntime.InferenceSession(Path(folder) / "unembed.onnx", providers=["CPUExecutionProvider"])
    states = torch.randn(3, 48)
    (logits,) = session.run(None, {session.get_inputs()[0].name: states.numpy()})
    expected = model_of("llama").family.unembed(states)
    torch.testing.assert_close(torch.from_numpy(logits), expected, rtol=1e-4, atol=1e-4)
    trunk = onnxruntime.InferenceSession(Path(folder) / "draft.trunk.onnx", providers=["CPUExecutionProvider"])
    assert [i.name for i in trunk.get_inputs()] == ["x", "positions", "slots", "block_table", "k0", "v0"]
    assert [o.name for o in trunk.get_outputs()] == ["states", "new_k0", "new_v0"]


def test_an_artifact_that_was_moved_answers_as_before(copied: Path, artifact_of: Callable[[str], Path]) -> None:
    moved = LLM(copied, "autoregressive", backend="onnx", num_blocks=64)
    assert answers(moved, PROMPTS[:2]) == answers(
        LLM(artifact_of("llama"), "autoregressive", backend="eager", num_blocks=64), PROMPTS[:2]
    )


def test_auto_takes_onnx_before_eager(artifact_of: Callable[[str], Path]) -> None:
    assert Artifact.open(artifact_of("llama")).select().build.backend == "onnx"


# ---- what is refused ----


def rewrite(artifact: Path, change: Callable[[Any], None]) -> Path:
    """Change unembed's first external tensor, and the records with it: an artifact whose hashes are right."""
    file = folder_of(artifact) / "unembed.onnx"
    model = onnx.load(file, load_external_data=False)
    change(next(t for t in model.graph.initializer if t.external_data))
    file.write_bytes(model.SerializeToString())
    record_again(artifact)
    return artifact


def record_again(artifact: Path) -> None:
    manifest = json.loads((artifact / "hispec.json").read_text())
    (artifact / "hispec.json").unlink()
    write_manifest(artifact, Manifest.from_json(json.dumps(manifest)))


def entry(key: str, value: str) -> Callable[[Any], None]:
    def change(tensor: Any) -> None:
        next(e for e in tensor.external_data if e.key == key).value = value

    return change


def load_onnx(artifact: Path) -> None:
    opened = Artifact.open(artifact)
    backends.load(opened, opened.select("onnx"))


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("location", "../../hispec.json", "plain file name"),
        ("location", "/etc/passwd", "plain file name"),
        ("location", "..", "plain file name"),
        ("location", "C:\\secret", "plain file name"),
        ("location", "absent.bin", "no plain file"),
        ("offset", "999999999", "up to byte"),
        ("length", "-4", "two numbers"),
    ],
)
def test_data_outside_the_folder_or_the_file_is_refused(copied: Path, key: str, value: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        load_onnx(rewrite(copied, entry(key, value)))


def test_a_link_in_place_of_the_data_is_refused(copied: Path, tmp_path: Path) -> None:
    data = folder_of(copied) / DATA_FILE
    shutil.move(data, tmp_path / "outside.bin")
    data.symlink_to(tmp_path / "outside.bin")
    with pytest.raises(ValueError, match="link"):
        Artifact.open(copied)
    with pytest.raises(ValueError, match="no plain file"):
        check_model(folder_of(copied) / "unembed.onnx", "unembed")


def test_swapped_models_are_told_though_the_records_fit(copied: Path) -> None:
    first, second = (folder_of(copied) / f"{name}.onnx" for name in ("draft.trunk", "target.trunk"))
    one, other = first.read_bytes(), second.read_bytes()
    first.write_bytes(other)
    second.write_bytes(one)
    record_again(copied)
    with pytest.raises(ValueError, match=r"belongs to program '(target|draft)\.trunk', but stands for"):
        load_onnx(copied)


def test_a_model_that_names_no_program_is_refused(copied: Path) -> None:
    file = folder_of(copied) / "unembed.onnx"
    model = onnx.load(file, load_external_data=False)
    del model.metadata_props[:]
    file.write_bytes(model.SerializeToString())
    with pytest.raises(ValueError, match="names no program, but stands for 'unembed'"):
        check_model(file, "unembed")


def test_short_or_missing_data_are_errors_not_zeros(copied: Path) -> None:
    data = folder_of(copied) / DATA_FILE
    content = data.read_bytes()
    data.write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match=r"weights\.bin has \d+ bytes, expected"):
        load_onnx(copied)
    record_again(copied)  # by somebody who has made the records fit
    with pytest.raises(ValueError, match="but that file has"):
        load_onnx(copied)
    data.unlink()
    record_again(copied)
    with pytest.raises(ValueError, match="no plain file"):
        load_onnx(copied)


def test_a_file_that_is_no_model_is_refused(copied: Path) -> None:
    (folder_of(copied) / "unembed.onnx").write_bytes(b"\xff" * 64)
    record_again(copied)
    with pytest.raises(ValueError, match=r"unembed\.onnx"):
        load_onnx(copied)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    base = tmp_path / "base"
    model_of("llama").base.save_pretrained(base)
    path = tmp_path / "native.yaml"
    path.write_text(f"model:\n  base: {base}\n  exits:\n    - {{name: draft, layer: 1, head: native}}\n")
    return path


def refused(config: Path, capsys: pytest.CaptureFixture[str], *options: str) -> str:
    output = config.parent / "artifact"
    assert main(["--config", str(config), "--output", str(output), *options]) == 2
    assert not output.exists()
    return capsys.readouterr().err


def test_bfloat16_on_cpu_is_refused_before_any_work(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    error = refused(config, capsys, "--backend", "eager,onnx", "--dtype", "float32,bfloat16")
    for word in ("--dtype bfloat16", "--backend onnx", "float32", "inductor"):
        assert word in error


@pytest.mark.parametrize("package", ["onnx", "onnxscript", "onnxruntime"])
def test_a_missing_package_is_refused_with_the_command(
    config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    error = refused(config, capsys, "--backend", "onnx")
    assert package in error and "pip install 'hispec[onnx]'" in error


@pytest.mark.parametrize("package", ["onnx", "onnxruntime"])
def test_loading_without_a_package_is_refused_with_the_command(
    artifact_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    folder = artifact_of("llama")
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ValueError, match=rf"{package}, not installed here: pip install 'hispec\[onnx\]'"):
        LLM(folder, backend="onnx")
    assert LLM(folder, backend="eager", num_blocks=64).backend == "eager"


def test_another_pytorch_or_machine_is_no_reason_but_an_older_onnxruntime_is(
    artifact_of: Callable[[str], Path],
) -> None:
    build = Artifact.open(artifact_of("llama")).select("onnx").build
    moved = dataclasses.replace(build, torch_version="1.0.0", machine="pdp11", cpu_capability="AVX9000")
    assert moved.misfits() == [] == build.unproved()
    assert any("pdp11" in line for line in moved.unproved()) and any("AVX9000" in line for line in moved.unproved())
    newer = dataclasses.replace(build, versions={"onnxruntime": "99.1.0"})
    assert "99.1.0" in newer.misfits()[0] and onnxruntime.__version__ in newer.misfits()[0]
    older = dataclasses.replace(build, versions={"onnxruntime": "1.2.0"})
    assert older.misfits() == [] and "1.2.0" in older.unproved()[0]
