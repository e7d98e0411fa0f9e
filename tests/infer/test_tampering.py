"""An artifact that is not what was exported is refused before any loader sees it; so is one whose hashes were made to
fit, as far as that can be told without a signature."""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import struct
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from infer import LLM
from infer.artifact import Artifact, write_manifest
from infer.backends import eager
from infer.cli import main
from infer.manifest import BuildInfo, Manifest
from infer.package import PROGRAM_KEY, check_package
from infer.plan import write_plan
from tests.tiny_engine import DEVICE

Members = dict[str, bytes]


def native_code_was_reached(*_: Any, **__: Any) -> Any:
    raise AssertionError("a loader saw the file")


@pytest.fixture
def no_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch._inductor.aoti_load_package", native_code_was_reached)
    monkeypatch.setattr(eager, "load_file", native_code_was_reached)
    monkeypatch.setattr(eager, "read_graph", native_code_was_reached)


@pytest.fixture
def no_loaders(no_programs: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infer.draft_vocab.load_file", native_code_was_reached)
    monkeypatch.setattr("infer.llm.load_tokenizer", native_code_was_reached)


@pytest.fixture
def folder(artifact: Path, tmp_path: Path) -> Path:
    """A copy of the tiny artifact with a stand-in of a package set beside the eager one."""
    folder = shutil.copytree(artifact, tmp_path / "artifact")
    (built,) = Artifact.open(folder).programs()
    infos = {name: replace(info, file=f"{name}.pt2") for name, info in built.build.programs.items()}
    build = replace(built.build, backend="inductor", programs=infos)
    programs = folder / "programs" / build.folder_name
    programs.mkdir()
    for name in infos:
        write_package(programs / f"{name}.pt2", name)
    (programs / "build.json").write_text(build.to_json())
    rehash(folder)
    return folder


def rehash(folder: Path) -> None:
    """What somebody does who can write everything: hispec.json fits whatever stands there."""
    write_manifest(folder, Manifest.from_json((folder / "hispec.json").read_text()))


def members_of(program: str | None, stem: str = "x") -> Members:
    """A package as torch 2.13 writes it, but for what it does."""
    metadata = {"AOTI_DEVICE_KEY": "cpu"} | ({PROGRAM_KEY: program} if program else {})
    return {
        f"{stem}/data/aotinductor/model/c.wrapper.cpp": b"int x;",
        f"{stem}/data/aotinductor/model/c.wrapper_metadata.json": json.dumps(metadata).encode(),
        f"{stem}/data/aotinductor/model/c.wrapper.so": b"\x7fELF",
        f"{stem}/archive_format": b"pt2",
        f"{stem}/.data/version": b"3",
    }


def write_package(path: Path, program: str | None, extra: Members | None = None, compression: int = 0) -> Path:
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in (members_of(program) | (extra or {})).items():
            archive.writestr(name, content)
    return path


def refuse(folder: Path, *words: str, backend: str = "auto") -> None:
    with pytest.raises(ValueError) as error:
        LLM(folder, backend=backend, device=str(DEVICE))
    for word in (*words, "python -m export"):
        assert word in str(error.value)


# ---- what hashes tell ----


@pytest.mark.parametrize(
    "pattern",
    ["programs/eager-*/draft.trunk.graph.json", "weights/float32/target.trunk.safetensors", "draft_vocab.safetensors",
     "programs/inductor-*/unembed.pt2", "programs/eager-*/build.json", "tokenizer.json", "config.json", "parity.json"],
)  # fmt: skip
def test_a_flipped_bit_in_any_kind_of_file_is_refused_before_any_loader(folder: Path, no_loaders: None, pattern: str):
    (path,) = folder.glob(pattern)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    refuse(folder, path.relative_to(folder).as_posix(), "sha256")


@pytest.mark.parametrize("suffix", [".safetensors", ".pt2"])  # their graphs are the same file
def test_two_tiers_programs_swapped_are_refused_before_any_loader(folder: Path, no_loaders: None, suffix: str):
    swap(folder, suffix)
    refuse(folder, f"intermediate.trunk{suffix}")


def test_another_models_manifest_is_refused_before_any_loader(folder: Path, no_loaders: None):
    other = json.loads((folder / "hispec.json").read_text())
    other["files"]["config.json"]["sha256"] = "0" * 64
    (folder / "hispec.json").write_text(json.dumps(other))
    refuse(folder, "config.json", "sha256")


def test_a_cut_file_an_extra_one_and_links_are_refused_before_any_loader(folder: Path, no_loaders: None, tmp_path):
    (path,) = folder.glob("programs/inductor-*/unembed.pt2")
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    refuse(folder, "unembed.pt2", f"expected {len(whole)}")
    os.truncate(path, 1 << 40)  # sparse: no such size is ever read
    refuse(folder, "unembed.pt2", str(1 << 40))
    (tmp_path / "unembed.pt2").write_bytes(whole)
    path.unlink()
    path.symlink_to(tmp_path / "unembed.pt2")
    refuse(folder, "unembed.pt2 is a link")
    path.unlink()
    path.write_bytes(whole)
    (path.parent / "extra.pt2").write_bytes(whole)
    refuse(folder, "extra.pt2 has no record")
    (path.parent / "extra.pt2").unlink()
    os.rename(path.parent, tmp_path / "programs")
    path.parent.symlink_to(tmp_path / "programs")
    refuse(folder, "is a link")


# ---- what is told even where hashes were made to fit ----


def swap(folder: Path, suffix: str) -> None:
    """The programs of two tiers that have as many layers each: alike in all but their weights."""
    (one,) = folder.rglob(f"intermediate.trunk{suffix}")
    (other,) = folder.rglob(f"target.trunk{suffix}")
    os.rename(one, one.with_name("swap"))
    os.rename(other, one)
    os.rename(one.with_name("swap"), other)


@pytest.mark.parametrize(("suffix", "backend"), [(".safetensors", "eager"), (".pt2", "inductor")])
def test_swapped_tiers_with_right_hashes_are_refused_by_the_names_inside(
    folder: Path, no_programs: None, suffix: str, backend: str
):
    swap(folder, suffix)
    rehash(folder)
    Artifact.open(folder)
    refuse(folder, "belongs to program 'target.trunk'", "stands for 'intermediate.trunk'", backend=backend)


def test_graphs_of_other_programs_are_refused_by_what_they_take(folder: Path):
    (trunk,) = folder.rglob("draft.trunk.graph.json")
    (unembed,) = folder.glob("programs/eager-*/unembed.graph.json")
    shutil.copy(unembed, trunk)
    rehash(folder)
    refuse(folder, "draft.trunk.graph.json", backend="eager")


def test_swapped_kv_layers_are_refused(folder: Path, no_loaders: None):
    (path,) = folder.glob("programs/eager-*/build.json")
    build = BuildInfo.from_json(path.read_text())
    one, other = build.programs["intermediate.trunk"], build.programs["target.trunk"]
    build.programs["intermediate.trunk"], build.programs["target.trunk"] = other, one
    path.write_text(build.to_json())
    rehash(folder)
    refuse(folder, "intermediate.trunk takes kv_layers=[4, 5], expected [2, 3]", backend="eager")


@pytest.mark.parametrize("backend", ["eager", "onnx"])
@pytest.mark.parametrize("name", ["evil.x-1.payload", "evil", "os", "", "../evil"])
def test_packages_that_a_record_names_are_never_imported(
    folder: Path, no_loaders: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, backend: str
):
    """An artifact below the working folder is a package, of which Python would run any file."""
    payload = tmp_path / "evil" / "x-1" / "payload.py"
    payload.parent.mkdir(parents=True)
    for path in (payload, tmp_path / "evil" / "__init__.py"):
        path.write_text(f"import os; os.mkdir({str(tmp_path / 'was-run')!r}); __version__ = '1'")
    monkeypatch.syspath_prepend(tmp_path)
    (path,) = folder.glob("programs/eager-*/build.json")
    build = replace(BuildInfo.from_json(path.read_text()), backend=backend, versions={name: "1"})
    path.write_text(build.to_json())
    path.parent.rename(path.parent.with_name(build.folder_name))
    rehash(folder)
    for command in (lambda: Artifact.open(folder).programs(), lambda: Artifact.open(folder).select(backend)):
        with pytest.raises(ValueError, match=rf"versions\.{re.escape(name)} is no package of backend '{backend}'"):
            command()
    assert main(["inspect", str(folder)]) == 2
    assert not (tmp_path / "was-run").exists()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda v: {}, "holds []"),
        (lambda v: v | {"other": v["draft"]}, "holds ['draft', 'other']"),
        (lambda v: {"draft": v["draft"][:-1]}, "expected int64 [200]"),
        (lambda v: {"draft": v["draft"].int()}, "int32"),
        (lambda v: {"draft": v["draft"].flip(0).contiguous()}, "must ascend strictly within 0..299"),
        (lambda v: {"draft": v["draft"] + 200}, "must ascend strictly within 0..299"),
        (lambda v: {"draft": v["draft"] - 1}, "must ascend strictly within 0..299"),
    ],
)
def test_a_trimmed_vocabulary_that_does_not_fit_is_refused(folder: Path, no_programs: None, change: Any, words: str):
    path = folder / "draft_vocab.safetensors"
    save_file({name: ids.clone() for name, ids in change(load_file(path)).items()}, path)
    rehash(folder)
    refuse(folder, "draft_vocab.safetensors", words)


def test_a_missing_trimmed_vocabulary_is_refused(folder: Path, no_programs: None):
    (folder / "draft_vocab.safetensors").unlink()
    rehash(folder)
    refuse(folder, "is missing, but exits ['draft'] are trimmed")


# ---- packages ----


@pytest.fixture
def package(tmp_path: Path) -> Path:
    return write_package(tmp_path / "a.pt2", "a.trunk")


def test_a_package_as_pytorch_writes_it_passes(package: Path, tmp_path: Path):
    check_package(package, "a.trunk")
    twice = {"x/data/aotinductor/model/d_metadata.json": b"{}"}  # one that names it is enough
    check_package(write_package(tmp_path / "b.pt2", "a.trunk", twice), "a.trunk")


def test_a_package_that_names_no_program_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match=r"names no program, but stands for 'a\.trunk'; .*python -m export"):
        check_package(write_package(tmp_path / "a.pt2", None), "a.trunk")
    bare = write_package(tmp_path / "b.pt2", "a.trunk")
    with zipfile.ZipFile(bare, "w") as archive:
        archive.writestr("x/archive_format", "pt2")
    with pytest.raises(ValueError, match="names no program"):
        check_package(bare, "a.trunk")


def test_weights_that_name_no_program_are_refused_before_they_are_read(folder: Path, no_programs: None):
    path = folder / "weights" / "float32" / "unembed.safetensors"
    save_file(load_file(path), path)
    rehash(folder)
    refuse(folder, "unembed.safetensors", "names no program", backend="eager")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("x/../../etc/cron.d/y", "plain path"),
        ("/x/data/aotinductor/model/y", "plain path"),
        ("x/data/aotinductor/model/..\\y", "plain path"),
        ("x/data/aotinductor/model/../y", "plain path"),
        ("x/data/aotinductor/model/sub/y.so", "neither"),
        ("x/data/aotinductor/other/y.so", "neither"),
        ("x/data/weights/model.pt", "unpickled"),
        ("x/data/weights/weight_0", "might unpickle"),
        ("x/data/constants/model_constants_config.json", "might unpickle"),
        ("x/data/sample_inputs/model.pt", "unpickled"),
        ("x/models/model.json", "might unpickle"),
        ("x/extra/note", "neither"),
        ("y/archive_version", "one folder"),
        ("x/data/aotinductor/model/d_metadata.json", "belongs to program 'b.trunk'"),
    ],
)
def test_members_that_code_does_not_need_are_refused(tmp_path: Path, name: str, words: str):
    content = json.dumps({PROGRAM_KEY: "b.trunk"}).encode()
    path = write_package(tmp_path / "a.pt2", "a.trunk", {name: content})
    with pytest.raises(ValueError, match="python -m export") as error:
        check_package(path, "a.trunk")
    assert words in str(error.value)


def test_a_pickle_in_a_package_is_never_run(tmp_path: Path, no_programs: None):
    """C11: PyTorch unpickles what lies under data/weights without asking whether it is plain."""

    class Payload:
        def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
            return os.mkdir, (str(tmp_path / "was-run"),)

    torch.save(Payload(), tmp_path / "payload")
    path = write_package(
        tmp_path / "a.pt2", "a.trunk", {"x/data/weights/payload.pt": (tmp_path / "payload").read_bytes()}
    )
    with pytest.raises(ValueError, match="would be unpickled"):
        check_package(path, "a.trunk")
    assert not (tmp_path / "was-run").exists()


def test_links_twins_and_compressed_members_are_refused(tmp_path: Path):
    link = zipfile.ZipInfo("x/data/aotinductor/model/l.so")
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    with zipfile.ZipFile(write_package(tmp_path / "a.pt2", "a.trunk"), "a") as archive:
        archive.writestr(link, "/etc/passwd")
    with pytest.raises(ValueError, match="is a link"):
        check_package(tmp_path / "a.pt2", "a.trunk")
    with (
        pytest.warns(UserWarning, match="Duplicate name"),
        zipfile.ZipFile(write_package(tmp_path / "b.pt2", "a.trunk"), "a") as archive,
    ):
        archive.writestr("x/archive_format", "pt2")
    with pytest.raises(ValueError, match="stands twice"):
        check_package(tmp_path / "b.pt2", "a.trunk")
    bomb = {"x/data/aotinductor/model/zeros.so": bytes(1 << 20)}
    path = write_package(tmp_path / "c.pt2", "a.trunk", bomb, zipfile.ZIP_DEFLATED)
    assert path.stat().st_size < 1 << 14
    with pytest.raises(ValueError, match="is packed"):
        check_package(path, "a.trunk")


def test_members_that_overlap_in_the_file_are_refused(tmp_path: Path):
    """A bomb without compression: every entry of the directory points to the same bytes."""
    blob = {f"x/data/aotinductor/model/{i}.so": bytes(1000) for i in range(3)}
    path = write_package(tmp_path / "a.pt2", "a.trunk", {"x/data/aotinductor/model/0.so": blob[next(iter(blob))]})
    content = path.read_bytes()
    begin = content.index(b"PK\x01\x02")
    first = content.rindex(b"PK\x01\x02")  # the entry of 0.so, written last
    end = content.rindex(b"PK\x05\x06")
    entries = b"".join(content[first:end].replace(b"model/0.so", b"model/%d.so" % i) for i in range(1, 4))
    count = content[begin:end].count(b"PK\x01\x02") + 3
    tail = bytearray(content[end:])
    struct.pack_into("<HHI", tail, 8, count, count, end - begin + len(entries))
    path.write_bytes(content[:end] + entries + tail)
    with pytest.raises(ValueError, match=r"\d+ bytes that would unpack to \d+"):
        check_package(path, "a.trunk")


@pytest.mark.parametrize("content", [b"", b"PK\x05\x06", b"not a zip", b"PK\x05\x06" + bytes(18)])
def test_what_is_no_package_is_refused(tmp_path: Path, content: bytes):
    (tmp_path / "a.pt2").write_bytes(content)
    with pytest.raises(ValueError, match="python -m export"):
        check_package(tmp_path / "a.pt2", "a.trunk")


@pytest.mark.parametrize("member", ["data/weights/w.pt", "../../y"])
def test_one_bad_package_keeps_all_others_from_being_loaded(folder: Path, no_programs: None, member: str):
    (path,) = folder.glob("programs/inductor-*/unembed.pt2")
    write_package(path, "unembed", {f"x/{member}": b""})
    rehash(folder)
    refuse(folder, "unembed.pt2", backend="inductor")


# ---- writing ----


def test_a_plan_is_never_written_through_what_lies_at_its_temporary_name(folder: Path, tmp_path: Path):
    class Stub:
        def to_json(self) -> str:
            return "{}"

    (tmp_path / "outside").write_text("mine")
    os.link(tmp_path / "outside", folder / "plan.json.tmp")
    Artifact.open(folder)
    write_plan(folder, Stub())  # type: ignore[arg-type]
    assert (tmp_path / "outside").read_text() == "mine" and (folder / "plan.json").read_text() == "{}"
