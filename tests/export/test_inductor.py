"""How packages are compiled; what they compute is tested with the other backends'."""

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._inductor.exc import InductorError

from export.backends import inductor
from export.cli import _stopped_by_sigterm
from infer import backends
from infer.mapped_pages import read_mappings
from tests.export.slow_compiler import SlowJob, compile_slowly


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def mapped_libraries() -> set[str]:
    """Of packages: PyTorch unpacks each into a folder of its own."""
    files = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
    return {file for file in files if file.endswith(".wrapper.so")}


def test_sigterm_ends_compilers_instead_of_waiting_for_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inductor, "_compile", compile_slowly)
    jobs = [SlowJob(tmp_path / f"{number}.safetensors") for number in range(3)]
    for job in jobs:
        job.weights_file.touch()
    sent = list[float]()

    def stop_when_two_compile() -> None:
        while len(list(tmp_path.glob("*.pids"))) < 2:
            time.sleep(0.05)
        sent.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=stop_when_two_compile, daemon=True).start()
    with pytest.raises(SystemExit), _stopped_by_sigterm():
        list(inductor._compile_all(jobs, num_workers=2))  # type: ignore[arg-type]
    assert time.monotonic() - sent[0] < 30, "it waited for compilers of 60 seconds"
    pids = [int(pid) for file in tmp_path.glob("*.pids") for pid in file.read_text().split()]
    assert len(pids) == 4
    while any(map(is_running, pids)) and time.monotonic() - sent[0] < 30:
        time.sleep(0.05)
    assert not any(map(is_running, pids))


def job_of(name: str, file: Path, device: str = "cpu", autotune: bool = False) -> inductor._Job:
    return inductor._Job(
        name=name, graph_file=file, weights_file=file, package=file, device=device, autotune=autotune,
        own_products=False, num_threads=torch.get_num_threads(),
    )  # fmt: skip


@pytest.mark.parametrize(("device", "autotune"), [("cpu", True), ("cpu", False), ("cuda", True)])
def test_where_autotuning_fails_a_cpu_program_has_inductors_own_kernels(
    device: str, autotune: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []

    def fail_first(job: inductor._Job, autotune: bool) -> None:
        tried.append(autotune)
        if len(tried) == 1:
            raise InductorError(AssertionError("Incorrect result from choice\n\n"), None)

    monkeypatch.setattr(inductor, "_write_package", fail_first)
    monkeypatch.setenv("LIBRARY_PATH", "")  # which it changes
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    job = job_of("exit", tmp_path, device, autotune)
    if device == "cpu" and autotune:
        _, _, fault = inductor._compile(job, str(tmp_path))
        assert tried == [True, False] and fault == "AssertionError: Incorrect result from choice"
    else:
        with pytest.raises(InductorError):
            inductor._compile(job, str(tmp_path))
        assert tried == [autotune]


def test_programs_that_compile_at_once_have_files_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two unembeddings are one code; a package was found with the other's name, and might have had its weights."""
    seen = list[Path]()
    monkeypatch.setenv("LIBRARY_PATH", "")  # which it changes
    monkeypatch.setattr(inductor, "_write_package", lambda *_: seen.append(Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "whatever was set")
    for name in ("draft.unembed", "intermediate.unembed"):
        inductor._compile(job_of(name, tmp_path), str(tmp_path))
    assert len(set(seen)) == 2 and all(folder.parent == tmp_path for folder in seen)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="Linux's /proc")
def test_loaded_packages_hold_no_pages_of_their_libraries(exported: Callable[..., Any]) -> None:
    """They have copied the weights out of them: in memory these would stand twice."""
    made = exported("llama", "inductor")
    before = mapped_libraries()
    programs = backends.load(made.artifact, made.program_set)
    new = mapped_libraries() - before
    assert len(new) == len(programs)
    mappings = [one for one in read_mappings({Path(file).name for file in new}) if one.file in new]
    assert len(mappings) >= len(programs)
    assert sum(one.resident for one in mappings) == 0, mappings
    assert list(programs) == list(made.infos)
