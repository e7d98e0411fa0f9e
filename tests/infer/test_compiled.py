"""Backend `compile`: eager's programs, compiled at load. One is compiled for real, PyTorch runs the others' graphs."""

import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from infer import SamplingParams
from infer.artifact import Artifact, write_manifest
from infer.backends import compiled, eager
from tests.tiny_artifact import load
from tests.tiny_engine import DEVICE

PROMPTS = ["Hello, world! A small text", "the sea", "stones and the people by"]
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything but the C++ compiler: dynamo's graphs, run by PyTorch."""
    real = torch.compile

    def compile_quickly(function: Any, *, options: dict[str, Any], **kwargs: Any) -> Any:
        assert options["guard_filter_fn"]
        return real(function, backend="aot_eager", **kwargs)

    monkeypatch.setattr(torch, "compile", compile_quickly)


@pytest.fixture
def no_recompilation() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch.compiler.set_stance("default")


@pytest.mark.filterwarnings("ignore:backend='compile'")
@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["layerskip", "autoregressive", "hispec"])
@pytest.mark.usefixtures("quick", "no_recompilation")
def test_it_serves_the_tokens_of_eager(artifact: Path, strategy: str) -> None:
    expected = [
        o.outputs[0].token_ids for o in load(artifact, "autoregressive", backend="eager").generate(PROMPTS, GREEDY)
    ]
    llm = load(artifact, strategy, backend="compile")
    assert llm.backend == "compile"
    assert [o.outputs[0].token_ids for o in llm.generate(PROMPTS, GREEDY)] == expected


@pytest.mark.usefixtures("no_recompilation")
def test_a_program_is_compiled_once_for_calls_of_every_size(artifact: Path) -> None:
    opened = Artifact.open(artifact)
    chosen = opened.select("compile", device=str(DEVICE))
    name = "draft.unembed"
    build = replace(chosen.build, programs={name: chosen.build.programs[name]})
    program = compiled.load_programs(opened, replace(chosen, build=build))[name]
    eager_program = eager.load_programs(opened, replace(chosen, build=build))[name]
    torch.compiler.set_stance("fail_on_recompile")
    width = opened.manifest.base.exit_size
    for number in (1, 2, 7, 64):
        states = torch.randn(number, width, generator=torch.Generator().manual_seed(number)).to(DEVICE)
        torch.testing.assert_close(program(states), eager_program(states), rtol=0, atol=1e-5)
    with torch.inference_mode():
        assert program(torch.zeros(3, width, device=DEVICE)).shape == (3, 200)


@pytest.mark.slow
@pytest.mark.usefixtures("quick", "no_recompilation")
def test_that_nobody_has_measured_its_bits_is_said(artifact: Path) -> None:
    assert any(one.bitwise_range for one in Artifact.open(artifact).select("eager").build.programs.values())
    with pytest.warns(UserWarning, match="last bits of each other; bitwise=False says the same"):
        llm = load(artifact, backend="compile")
    assert not any(one.bitwise_range for one in llm.build.programs.values())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load(artifact, backend="compile", bitwise=False)


def test_without_a_compiler_it_is_refused_with_the_remedy(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ValueError, match=r"'no-such-compiler' is not on PATH: apt-get install g\+\+") as error:
        load(artifact, backend="compile")
    assert "backend='compile,eager' falls back" in str(error.value)
    assert "python -m export" not in str(error.value)
    with pytest.warns(UserWarning, match="running eager float32 instead: .*no-such-compiler"):
        assert load(artifact, backend="compile,eager").backend == "eager"


def test_without_eager_programs_it_says_what_to_export(artifact: Path, tmp_path: Path) -> None:
    opened = Artifact.open(artifact)
    (build,) = (one.build for one in opened.programs())
    folder = tmp_path / "a" / "programs" / replace(build, backend="inductor").folder_name
    folder.mkdir(parents=True)
    for program in build.programs.values():
        (folder / program.file).write_bytes(b"code")
    (folder / "build.json").write_text(replace(build, backend="inductor").to_json())
    write_manifest(tmp_path / "a", replace(opened.manifest, files={}))
    with pytest.raises(ValueError, match=r"no programs for backend='compile'.*it has inductor/.*--backend eager"):
        load(tmp_path / "a", backend="compile")
