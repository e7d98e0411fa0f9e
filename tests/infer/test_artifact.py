import importlib.metadata
import json
import os
import platform
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from infer import manifest
from infer.artifact import Artifact, write_manifest
from infer.device import host_capability
from infer.manifest import FORMAT_VERSION, BaseInfo, BuildInfo, ExitInfo, Limits, Manifest, ProgramInfo, TierInfo

BASE = BaseInfo(
    name="tiny", revision=None, config_sha256="0" * 64, family="llama", num_layers=6, hidden_size=32, exit_size=32,
    vocab_size=100, num_kv_heads=2, head_dim=8,
)  # fmt: skip
MANIFEST = Manifest(
    base=BASE,
    tiers=[
        TierInfo(name="draft", start=0, stop=2, exit="draft"),
        TierInfo(name="intermediate", start=2, stop=4, exit="intermediate"),
        TierInfo(name="target", start=4, stop=6, exit="target"),
    ],
    exits=[
        ExitInfo(name="draft", layer=2, head="layer", vocab_size=50, has_kv=True),
        ExitInfo(name="intermediate", layer=4, head="linear", vocab_size=None, has_kv=False),
        ExitInfo(name="target", layer=6, head="native", vocab_size=None, has_kv=False),
    ],
    dtypes=["float32", "bfloat16"],
    block_size=16,
    limits=Limits(max_model_len=64, prefill_chunk=16, max_query_len=8, max_batch=4),
    eos_token_ids=[2],
    provenance={"argv": ["export"], "versions": {"torch": torch.__version__}},
)
PROGRAMS = {
    name: ProgramInfo(file=f"{name}.bin", kv_layers=layers, bitwise_range=(1, 32), num_kernels={"amx": 3})
    for name, layers in MANIFEST.kv_layers().items()
}


def build(backend: str = "eager", dtype: str = "float32", **changes) -> BuildInfo:
    here = BuildInfo(
        backend=backend, device="cpu", dtype=dtype, torch_version=torch.__version__, machine=platform.machine(),
        cpu_capability=host_capability(), num_threads=2, programs=PROGRAMS,
    )  # fmt: skip
    return replace(here, **changes)


def write(folder: Path, *builds: BuildInfo) -> Path:
    (folder / "weights").mkdir(parents=True)
    (folder / "weights" / "heads.safetensors").write_bytes(b"weights")
    (folder / "config.json").write_text("{}")
    for info in builds:
        programs = folder / "programs" / info.folder_name
        programs.mkdir(parents=True)
        for program in PROGRAMS.values():
            (programs / program.file).write_bytes(b"program")
        (programs / "build.json").write_text(info.to_json())
    write_manifest(folder, MANIFEST)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(tmp_path / "artifact", build())


def edit(folder: Path, change) -> None:
    """Tamper with hispec.json."""
    data = json.loads((folder / "hispec.json").read_text())
    change(data)
    (folder / "hispec.json").write_text(json.dumps(data))


def refuse(folder: Path, *words: str) -> None:
    with pytest.raises(ValueError) as error:
        Artifact.open(folder)
    for word in (*words, "python -m export"):
        assert word in str(error.value)


def test_what_was_written_is_what_is_read(folder):
    artifact = Artifact.open(folder)
    assert replace(artifact.manifest, files={}) == MANIFEST
    assert list(artifact.manifest.files) == sorted(artifact.manifest.files)
    assert artifact.manifest.files["config.json"].size == 2
    assert [s.build for s in artifact.programs()] == [build()]
    assert Manifest.from_json(artifact.manifest.to_json()) == artifact.manifest
    assert not (folder / "hispec.json.tmp").exists()


def test_writing_again_gives_the_same_manifest_and_plan_may_come_later(folder):
    first = (folder / "hispec.json").read_bytes()
    (folder / "plan.json").write_text("{}")
    Artifact.open(folder)
    write_manifest(folder, MANIFEST)
    assert (folder / "hispec.json").read_bytes() == first


def test_a_missing_folder_or_manifest_is_named(tmp_path):
    refuse(tmp_path / "nowhere", "nowhere")
    refuse(tmp_path, "hispec.json")


def test_a_missing_file_is_named(folder):
    (folder / "weights" / "heads.safetensors").unlink()
    refuse(folder, "weights/heads.safetensors", "missing")


def test_a_changed_byte_is_found(folder):
    (folder / "weights" / "heads.safetensors").write_bytes(b"weightz")
    refuse(folder, "weights/heads.safetensors", "sha256")


def test_a_cut_file_is_found_by_its_size(folder):
    (folder / "weights" / "heads.safetensors").write_bytes(b"weig")
    refuse(folder, "weights/heads.safetensors", "4 bytes", "expected 7")


def test_a_file_without_record_is_refused(folder):
    (folder / "weights" / "extra.pkl").write_bytes(b"")
    refuse(folder, "weights/extra.pkl", "no record")


@pytest.mark.parametrize(
    "name", ["../x", "/etc/passwd", "weights/../config.json", "./config.json", "weights//heads.safetensors", "", ".",
             "weights\\x", "C:x", "a\x00b", "hispec.json"]
)  # fmt: skip
def test_names_that_could_lead_elsewhere_are_refused(folder, name):
    edit(folder, lambda data: data["files"].update({name: data["files"]["config.json"]}))
    refuse(folder, "hispec.json")


def test_a_link_is_refused_whether_file_or_folder(folder, tmp_path):
    heads = folder / "weights" / "heads.safetensors"
    outside = tmp_path / "outside"
    outside.mkdir()
    os.replace(heads, outside / "heads.safetensors")
    heads.symlink_to(outside / "heads.safetensors")
    refuse(folder, "weights/heads.safetensors", "link")
    heads.unlink()
    (folder / "weights").rmdir()
    (folder / "weights").symlink_to(outside)
    refuse(folder, "weights", "link")


@pytest.mark.parametrize("text", ["", "{", "[1", "null", "[]", '"x"', "[" * 100_000])
def test_a_garbled_manifest_is_refused(folder, text):
    (folder / "hispec.json").write_text(text)
    refuse(folder, "hispec.json")


def test_a_file_that_is_recorded_twice_is_refused(folder):
    text = (folder / "hispec.json").read_text()
    first = text[text.index('"config.json"') : text.index("}", text.index('"config.json"')) + 1]
    (folder / "hispec.json").write_text(text.replace(first, f"{first}, {first}"))
    refuse(folder, "config.json", "twice")


def test_bytes_that_are_no_text_are_refused(folder):
    (folder / "hispec.json").write_bytes(b"\xff\xfe")
    refuse(folder, "hispec.json", "UTF-8")


def test_a_format_of_the_future_is_refused_naming_both_versions(folder):
    edit(folder, lambda data: data.update(format_version=FORMAT_VERSION + 1, tiers="whatever"))
    refuse(folder, f"format_version={FORMAT_VERSION + 1}", f"reads {FORMAT_VERSION}")


@pytest.mark.parametrize("field", ["format_version", "base", "tiers", "limits", "files", "eos_token_ids"])
def test_a_missing_field_is_named(folder, field):
    edit(folder, lambda data: data.pop(field))
    refuse(folder, field, "missing")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: d["base"].pop("head_dim"), ["base", "head_dim", "missing"]),
        (lambda d: d["base"].update(colour="red"), ["base", "colour", "unknown"]),
        (lambda d: d["base"].update(num_layers="6"), ["num_layers", "'6'", "int"]),
        (lambda d: d["base"].update(num_layers=True), ["num_layers", "True", "int"]),
        (lambda d: d["exits"][0].update(head="mlp"), ["exits[0]: head", "'mlp'"]),
        (lambda d: d["base"].update(num_layers=8), ["layer 6", "num_layers=8"]),
        (lambda d: d["tiers"][1].update(start=3), ["tiers", "gap"]),
        (lambda d: d["tiers"][1].update(stop=2), ["tiers", "gap"]),
        (lambda d: d.update(tiers=[]), ["tiers"]),
        (lambda d: d["tiers"][0].update(exit="nope"), ["tiers.draft.exit", "nope"]),
        (lambda d: d["exits"][0].update(layer=1), ["exits.draft.layer=1", "stop=2"]),
        (lambda d: d["exits"][0].update(name="target"), ["names of exits"]),
        (lambda d: d["exits"][0].update(vocab_size=101), ["exits.draft.vocab_size=101"]),
        (lambda d: d["exits"][2].update(vocab_size=50), ["target", "full vocabulary"]),
        (lambda d: d["limits"].update(max_batch=0), ["max_batch=0"]),
        (lambda d: d.update(dtypes=[]), ["dtypes"]),
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused(folder, change, words):
    edit(folder, change)
    refuse(folder, *words)


def test_auto_prefers_the_first_dtype_and_then_the_compiled_programs(tmp_path):
    builds = [build(b, d) for b in ("eager", "inductor") for d in ("bfloat16", "float32")]
    artifact = Artifact.open(write(tmp_path / "a", *builds))
    assert artifact.select().build == build("inductor", "float32")
    assert artifact.select(dtype="bfloat16").build == build("inductor", "bfloat16")
    assert artifact.select(backend="eager").build == build("eager", "float32")
    assert artifact.select().path.name == build("inductor", "float32").folder_name


@pytest.mark.parametrize(
    ("change", "here"),
    [
        ({"torch_version": "1.0.0"}, torch.__version__),
        ({"machine": "pdp11"}, platform.machine()),
        ({"cpu_capability": "AVX9000"}, host_capability()),
    ],
)
@pytest.mark.parametrize("backend", ["auto", "inductor"])
def test_programs_for_another_place_are_refused_and_eager_is_offered_not_taken(tmp_path, change, here, backend):
    artifact = Artifact.open(write(tmp_path / "a", build("eager"), build("inductor", **change)))
    with pytest.raises(ValueError) as error:
        artifact.select(backend)
    for word in (*change, *change.values(), here, "python -m export", "--backend inductor", "backend='eager'"):
        assert word in str(error.value)
    assert artifact.select("eager").build.backend == "eager"


def test_eager_programs_run_on_any_machine_but_not_on_any_pytorch(tmp_path):
    artifact = Artifact.open(write(tmp_path / "a", build(machine="pdp11", cpu_capability="none")))
    assert artifact.select().build.machine == "pdp11"
    artifact = Artifact.open(write(tmp_path / "b", build(torch_version="1.0.0")))
    with pytest.raises(ValueError, match=r"torch_version is 1\.0\.0"):
        artifact.select()


def test_a_set_rebuilt_with_this_pytorch_is_found_beside_the_old_one(tmp_path):
    artifact = Artifact.open(write(tmp_path / "a", build("inductor", torch_version="1.0.0"), build("inductor")))
    assert artifact.select().build == build("inductor")


@pytest.mark.parametrize(("wanted", "word"), [({"backend": "onnx"}, "onnx"), ({"device": "cuda"}, "cuda"),
                                              ({"dtype": "float16"}, "float16")])  # fmt: skip
def test_programs_that_were_never_exported_are_refused_with_what_there_is(folder, wanted, word):
    with pytest.raises(ValueError) as error:
        Artifact.open(folder).select(**wanted)
    for expected in (word, "eager/float32/cpu", "python -m export"):
        assert expected in str(error.value)


def test_a_program_outside_its_folder_is_refused(tmp_path):
    outside = replace(PROGRAMS["unembed"], file="../../weights/heads.safetensors")
    with pytest.raises(ValueError, match="has no record"):
        Artifact.open(write(tmp_path / "a", build(programs=PROGRAMS | {"unembed": outside}))).programs()


def test_the_programs_of_these_tiers_and_the_layers_they_take():
    assert MANIFEST.kv_layers() == {
        "draft.trunk": [0, 1], "intermediate.trunk": [2, 3], "target.trunk": [4, 5],
        "draft.exit": [6], "draft.unembed": [], "intermediate.exit": [], "target.exit": [], "unembed": [],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"target.trunk": PROGRAMS["draft.trunk"]}, "target.trunk takes kv_layers=[0, 1], expected [4, 5]"),
        ({"other.trunk": PROGRAMS["draft.trunk"]}, "'other.trunk' belongs to no tier"),
        ({"unembed": None}, "'unembed' is missing"),
        ({"unembed": replace(PROGRAMS["unembed"], file="target.exit.bin")}, "target.exit.bin stands for several"),
        ({"unembed": replace(PROGRAMS["unembed"], bitwise_range=(8, 2))}, "bitwise_range=(8, 2)"),
    ],
)
def test_a_set_of_programs_that_is_not_these_tiers_is_refused(tmp_path, change, words):
    """As when the programs of two tiers, or the manifest of another model, were put in with right hashes."""
    programs = {name: info for name, info in (PROGRAMS | change).items() if info is not None}
    with pytest.raises(ValueError) as error:
        Artifact.open(write(tmp_path / "a", build(programs=programs))).select()
    assert words in str(error.value) and "python -m export" in str(error.value)


def test_a_build_record_in_the_wrong_folder_is_refused(tmp_path):
    folder = write(tmp_path / "a", build(), build(dtype="bfloat16"))
    (folder / "programs" / build().folder_name / "build.json").write_text(build(dtype="bfloat16").to_json())
    write_manifest(folder, MANIFEST)
    with pytest.raises(ValueError, match="describes eager-cpu-bfloat16"):
        Artifact.open(folder).select()


def test_of_several_backends_the_first_that_runs_here_is_taken_with_a_warning_that_says_why(tmp_path):
    old = build("inductor", cpu_capability="AVX9000")
    artifact = Artifact.open(write(tmp_path / "a", build("eager"), old))
    with pytest.warns(UserWarning, match="running eager float32 instead.*AVX9000.*python -m export"):
        assert artifact.select("inductor,eager").build == build("eager")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert artifact.select("eager, inductor").build == build("eager")
    with pytest.raises(ValueError, match=r"AVX9000.*backend='onnx'"):
        artifact.select("inductor,onnx")
    (tmp_path / "b").mkdir()
    artifact = Artifact.open(write(tmp_path / "b" / "a", build("eager")))
    with pytest.warns(UserWarning, match="running eager float32 instead: .*no programs for backend='inductor'"):
        artifact.select("inductor,eager")


def install(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    """These distributions, and no others."""

    def version(name: str) -> str:
        if name.replace("-", "_") in versions:
            return versions[name.replace("-", "_")]
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)


@pytest.mark.parametrize(
    ("there", "missing"),
    [({"onnx": "1.19"}, "onnxruntime"), ({"onnxruntime": "1.23.0"}, "onnx"), ({}, "onnx and onnxruntime")],
)
def test_where_a_backends_package_is_missing_the_next_one_runs_and_auto_says_what_to_install(
    tmp_path, monkeypatch, there, missing
):
    install(monkeypatch, **there)
    onnx = build("onnx", versions={"onnxruntime": "1.23.0"})
    artifact = Artifact.open(write(tmp_path / "a", build("eager"), onnx))
    says = rf"[ :]{missing}, not installed here: pip install 'hispec\[onnx\]'"
    with pytest.warns(UserWarning, match=f"running eager float32 instead.*{says}"):
        assert artifact.select("onnx,eager").build == build("eager")
    for backend in ("auto", "onnx"):
        with pytest.raises(ValueError, match=f"{says}.*backend='onnx,eager' falls back"):
            artifact.select(backend)


@pytest.mark.parametrize("name", ["onnxruntime", "onnxruntime_gpu"])
def test_onnxruntime_is_known_by_either_name_and_an_older_one_is_no_fit(tmp_path, monkeypatch, name):
    onnx = build("onnx", versions={"onnxruntime": "1.23.0"})
    artifact = Artifact.open(write(tmp_path / "a", build("eager"), onnx))
    install(monkeypatch, onnx="1.19", **{name: "1.24.1"})
    assert artifact.select("onnx,eager").build == onnx
    assert "onnxruntime was 1.23.0, is 1.24.1" in onnx.unproved()
    install(monkeypatch, onnx="1.19", **{name: "1.22.9"})
    with pytest.warns(UserWarning, match=r"onnxruntime is 1\.23\.0 in the artifact, 1\.22\.9 here"):
        assert artifact.select("onnx,eager").build == build("eager")


@pytest.mark.parametrize("gap", [(5, 5), (-1, 4), (0, 513), (384, 192)])
def test_gaps_of_tables_that_no_period_has_are_refused(gap):
    """A large one would make every call's table large."""
    text = replace(build("eager"), slot_gaps=[(192, 384), gap]).to_json()
    with pytest.raises(ValueError, match=r"slot_gaps has \(.*expected 0 ≤ low < high ≤ 512"):
        BuildInfo.from_json(text)
    assert BuildInfo.from_json(replace(build("eager"), slot_gaps=[(192, 384)]).to_json()).slot_gaps == [(192, 384)]


@pytest.mark.parametrize("backend", ["eager", "inductor", "onnx", "compile"])
def test_bits_measured_on_another_processor_are_told_as_unproved(backend, monkeypatch):
    """An instruction set does not say it: the same library has other kernels for another maker's processor."""
    monkeypatch.setattr(manifest, "processor_name", lambda: "EPYC")
    here = build(backend, processor="EPYC")
    assert not here.unproved() and not replace(here, processor=None).unproved()
    elsewhere = replace(here, processor="Xeon").unproved()
    assert elsewhere == ([] if backend == "compile" else ["processor was Xeon, is EPYC"])
    told = replace(here, cpu_capability="AVX9000").unproved()
    assert told == ([f"cpu_capability was AVX9000, is {here.cpu_capability}"] if backend in ("eager", "onnx") else [])


def test_a_hard_link_is_the_file_that_it_is_but_never_written_through(folder, tmp_path):
    heads, outside = folder / "weights" / "heads.safetensors", tmp_path / "outside"
    os.link(heads, outside)
    Artifact.open(folder)
    outside.write_bytes(b"weightz")
    refuse(folder, "weights/heads.safetensors", "sha256")


def test_a_record_of_absurd_size_is_not_read(folder, monkeypatch):
    artifact = Artifact.open(folder)
    monkeypatch.setattr("infer.artifact.MAX_JSON", 100)
    refuse(folder, "hispec.json", "at most 100")
    with pytest.raises(ValueError, match=r"build\.json: \d+ bytes, at most 100"):
        artifact.programs()


@pytest.mark.parametrize("value", ["NaN", "-Infinity", "9" * 5000])
def test_numbers_that_are_none_are_refused(folder, value):
    text = (folder / "hispec.json").read_text()
    (folder / "hispec.json").write_text(text.replace('"block_size": 16', f'"block_size": {value}'))
    refuse(folder, "hispec.json")
