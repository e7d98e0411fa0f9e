"""A second export of the same thing compiles nothing; of anything else, everything that differs."""

from __future__ import annotations

import errno
import os
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import infer.backends.eager
from export import package_cache
from export.backends import inductor
from export.backends.backend import BuildJob
from export.graphs import Graphs
from export.programs import export_program, make_programs
from infer.manifest import Limits
from tests.export.tiny_exits import make_early_exit
from train.heads import ExitConfig

NAMES = ["draft.exit", "target.exit", "unembed"]  # the quickest to export, and one with pages
EXITS = [ExitConfig(name="draft", layer=1, head="layer")]
LIMITS = Limits(max_model_len=64, prefill_chunk=16, max_query_len=8, max_batch=4)


def export_graphs(folder: Path, change: Callable[[Any], None] = lambda model: None) -> Graphs:
    """Of one tiny model, made anew."""
    model, graphs = make_early_exit("llama", EXITS, num_hidden_layers=2), Graphs(folder)
    change(model)
    for program in make_programs(model, 16, inductor.FORM, "cpp"):
        if program.name in NAMES:
            graphs.write(program.name, inductor.FORM, export_program(program))
    return graphs


class Exports:
    """Builds into folders of their own, with a stand-in for the compiler."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.cache, self.lines = folder, folder / "cache" / "packages", list[str]()
        self.compiled = list[str]()

    def run(self, graphs: Graphs, **changes: Any) -> list[str]:
        """Names of the programs that were compiled; the job that was built stays in `job`."""
        out = Path(tempfile.mkdtemp(dir=self.folder))
        self.compiled.clear()
        self.job = replace(
            BuildJob(
                names=NAMES, graphs=graphs, folder=out, weights=out / "weights", device="cpu",
                dtype="float32", limits=LIMITS, autotune=False, num_threads=1, num_workers=1, cache=self.cache,
                report=self.lines.append,
            ),
            **changes,
        )  # fmt: skip
        inductor.build(self.job)
        return sorted(self.compiled)

    def compile_all(self, jobs: Sequence[Any], num_workers: int) -> Iterator[tuple[str, float, str]]:
        """Packages of no code, which name their program and hold its weights."""
        for job in jobs:
            with zipfile.ZipFile(job.package, "w") as archive:
                archive.writestr("model.cpp", job.name)
                archive.writestr("weights", job.weights_file.read_bytes())
            self.compiled.append(job.name)
            yield job.name, 0.0, ""

    def packages(self) -> dict[str, bytes]:
        return {name: (self.job.folder / f"{name}.pt2").read_bytes() for name in NAMES}


@pytest.fixture(scope="module")
def graphs(tmp_path_factory: pytest.TempPathFactory) -> Graphs:
    return export_graphs(tmp_path_factory.mktemp("graphs"))


@pytest.fixture
def exports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Exports:
    made = Exports(tmp_path)
    monkeypatch.setattr(inductor, "_compile_all", made.compile_all)
    monkeypatch.setattr(inductor, "_own_products_pay", lambda job: True)  # a trial: another test's matter
    return made


def test_a_second_export_of_the_same_model_compiles_nothing_and_has_the_same_packages(
    exports: Exports, graphs: Graphs, tmp_path: Path
) -> None:
    assert exports.run(graphs) == NAMES
    first = exports.packages()
    assert exports.run(export_graphs(tmp_path / "again")) == [] and exports.packages() == first
    assert "3 of 3 packages as an earlier export has compiled them" in exports.lines[-1]
    assert exports.run(graphs, cache=None) == NAMES, "--no-cache"


def change_norm(model: Any) -> None:
    with torch.no_grad():
        model.heads["draft"].norm.weight[0] += 1e-3


def test_programs_whose_weights_differ_are_compiled(exports: Exports, graphs: Graphs, tmp_path: Path) -> None:
    exports.run(graphs)
    changed = export_graphs(tmp_path / "changed", change_norm)
    assert exports.run(changed) == ["draft.exit"]
    assert exports.run(changed) == [] and exports.run(graphs) == [], "both are kept"


@pytest.mark.parametrize(
    "what", ["threads", "torch", "compiler", "environment", "options", "reader", "key", "products"]
)
def test_other_threads_versions_or_settings_compile_everything(
    exports: Exports, graphs: Graphs, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    exports.run(graphs)
    if what == "reader":
        reader = Path(infer.backends.eager.__file__)
        monkeypatch.setattr(
            inductor, "file_sha256", lambda path: "changed" if path == reader else package_cache.file_sha256(path)
        )
    if what == "products":
        monkeypatch.setattr(inductor, "_own_products_pay", lambda job: False)
    if what == "key":
        monkeypatch.setattr(inductor, "PROGRAM_KEY", "another_key")
    if what == "torch":
        monkeypatch.setattr(torch, "__version__", "9.9")
    if what == "compiler":
        monkeypatch.setattr(package_cache, "_compiler", lambda: ["clang++"])
    if what == "environment":
        monkeypatch.setenv("TORCHINDUCTOR_CPP_WRAPPER", "1")
    if what == "options":
        monkeypatch.setattr(inductor, "options", lambda device, autotune: {"freezing": False})
    assert exports.run(graphs, num_threads=2 if what == "threads" else 1) == NAMES


def test_what_was_chosen_by_trial_is_neither_kept_nor_taken(exports: Exports, graphs: Graphs) -> None:
    tuned = {"autotune": True, "dtype": "bfloat16"}
    assert exports.run(graphs, **tuned) == NAMES and exports.run(graphs, **tuned) == NAMES
    assert not exports.cache.exists()


def test_a_damaged_package_is_compiled_again(exports: Exports, graphs: Graphs) -> None:
    exports.run(graphs)
    (kept,) = [path for path in exports.cache.iterdir() if b"target.exit" in path.read_bytes()]
    content = kept.read_bytes()
    kept.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert exports.run(graphs) == ["target.exit"] and exports.run(graphs) == []


def test_a_folder_that_others_may_write_to_is_not_used(exports: Exports, graphs: Graphs) -> None:
    exports.run(graphs)
    exports.cache.chmod(0o777)
    assert exports.run(graphs) == NAMES and "may be written by, somebody else" in " ".join(exports.lines)


def test_the_least_recently_used_go_and_what_is_too_large_is_not_kept(
    exports: Exports, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = package_cache.PackageCache(tmp_path / "kept")
    assert cache.fault() == ""
    file, other = tmp_path / "file", tmp_path / "other"
    file.write_bytes(b"x" * 40)
    monkeypatch.setattr(package_cache, "MAX_BYTES", 100)
    for number, key in enumerate("ab"):
        cache.keep(key, file)
        (path,) = cache.folder.glob(f"{key}-*")
        os.utime(path, (number, number))
    assert cache.take("a", other) and other.read_bytes() == file.read_bytes()
    cache.keep("c", file)
    assert [cache.take(key, other) for key in "abc"] == [True, False, True]
    file.write_bytes(b"x" * 101)
    cache.keep("d", file)
    assert [cache.take(key, other) for key in "acd"] == [True, True, False], "nor does anything go for it"


def test_a_full_disk_or_a_broken_cache_costs_the_cache_and_not_the_export(
    exports: Exports, graphs: Graphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(source: Path, target: Path) -> None:
        target.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(package_cache.shutil, "copyfile", full)
        assert exports.run(graphs) == NAMES
    (line,) = [line for line in exports.lines if line.startswith("draft.exit.pt2 is not kept in the cache")]
    assert "No space left" in line
    assert list(exports.cache.iterdir()) == []
    assert exports.run(graphs) == NAMES
    with monkeypatch.context() as patch:
        patch.setattr(package_cache.shutil, "copyfile", full)
        assert exports.run(graphs) == NAMES
    assert any("draft.exit.pt2 is not taken from the cache" in line for line in exports.lines)
    assert exports.run(graphs) == []


def test_files_that_another_export_takes_away_meanwhile_are_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = package_cache.PackageCache(tmp_path / "kept")
    assert cache.fault() == ""
    file, other = tmp_path / "file", tmp_path / "other"
    file.write_bytes(b"x" * 40)
    gone = cache.folder / f"a-{'0' * 64}"
    with monkeypatch.context() as patch:  # it was there when the folder was read
        patch.setattr(Path, "glob", lambda self, pattern: [gone])
        assert not cache.take("a", other) and not other.exists()
    listed = Path.iterdir
    with monkeypatch.context() as patch:
        patch.setattr(Path, "is_file", lambda self: True)  # and when it was asked for
        patch.setattr(Path, "iterdir", lambda self: [gone, *listed(self)])
        cache.keep("a", file)
    assert cache.take("a", other) and other.read_bytes() == file.read_bytes()
