"""`infer bench --programs`: which calls are timed, and what becomes of their times. Speed itself is never asserted."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from infer import backends, machine, program_bench, program_calls
from infer.artifact import Artifact, write_manifest
from infer.border import takes_of
from infer.cli import main
from infer.manifest import BuildInfo, Manifest
from infer.program_bench import Cell, choose_sets, measure, standings
from infer.program_calls import Arguments, Grid, time_in_turn
from infer.program_report import to_record, verdict
from tests.tiny_engine import DEVICE

GRID = Grid(batch_sizes=(1, 3), tokens=(1, 4), context=10, rounds=3)
SMALL = ["--batch-sizes", "1,3", "--tokens", "1,4", "--context", "10", "--rounds", "3", "--device", str(DEVICE)]
NAMES = ["draft.trunk", "intermediate.trunk", "target.trunk", "draft.exit", "draft.unembed", "intermediate.exit",
         "unembed", "target.exit"]  # fmt: skip


class Clock:
    """Time goes on only where it is told to."""

    def __init__(self) -> None:
        self.now = 0.0
        self.calls: list[str] = []

    def perf_counter(self) -> float:
        return self.now

    def takes(
        self, seconds: float, name: str = "", function: Callable[..., Any] = lambda *_: None
    ) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            self.now += seconds
            self.calls.append(name)
            return function(*args)

        return run


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(program_bench, "time", clock)
    monkeypatch.setattr(program_calls, "time", clock)
    return clock


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program_calls, "LEAST_SECONDS", 0.0)
    monkeypatch.setattr(machine, "_copy_bandwidth", lambda device: 1.0)


@pytest.fixture(scope="module")
def two_sets(artifact: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The eager programs once more, under the name of another backend."""
    return with_set(artifact, tmp_path_factory.mktemp("two") / "artifact", backend="inductor")


def with_set(artifact: Path, folder: Path, **changes: Any) -> Path:
    shutil.copytree(artifact, folder)
    (eager,) = folder.glob("programs/eager-*")
    build = replace(BuildInfo.from_json((eager / "build.json").read_text()), **changes)
    other = shutil.copytree(eager, eager.with_name(build.folder_name))
    (other / "build.json").write_text(build.to_json())
    parity = json.loads((folder / "parity.json").read_text())
    parity["programs"][other.name] = [
        tier | {"max_error": error}
        for tier, error in zip(parity["programs"][eager.name], (1e-7, 3e-7, 2e-7), strict=True)
    ]
    (folder / "parity.json").write_text(json.dumps(parity))
    write_manifest(folder, Manifest.from_json((folder / "hispec.json").read_text()))
    return folder


@pytest.fixture(scope="module")
def programs(artifact: Path) -> dict[str, Callable[..., Any]]:
    opened = Artifact.open(artifact)
    return backends.load(opened, opened.select("eager", device=str(DEVICE)))


@pytest.fixture
def loaders(programs: dict[str, Callable[..., Any]], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Both backends are handed eager's programs here; loading them takes seconds."""
    loaders = dict.fromkeys(("eager", "inductor"), lambda *_: programs)
    monkeypatch.setattr(backends, "_LOADERS", loaders)
    return loaders


def test_rows_have_blocks_of_their_own_and_calls_are_what_the_border_lets_pass(artifact: Path) -> None:
    manifest = Artifact.open(artifact).manifest
    arguments = Arguments(manifest, torch.float32, DEVICE, GRID)
    takes = takes_of(manifest, torch.float32)
    for name, layers in manifest.kv_layers().items():
        width = takes[name].width
        given = arguments.of(name, 3, 4)
        assert given[0].dtype is takes[name].dtype and given[0].is_contiguous()
        if not layers:
            assert len(given) == 1 and given[0].shape == (12, width), name
            continue
        x, positions, slots, table, pages = given
        assert x.shape == ((3, 4) if width is None else (3, 4, width)), name
        assert positions.tolist() == [[10, 11, 12, 13]] * 3
        assert table.shape == (3, 4) and table.is_contiguous()  # blocks of 4 up to position 13
        blocks = table.flatten().tolist()
        assert len(set(blocks)) == 12 and 0 not in blocks and max(blocks) < len(pages[0])
        for b in range(3):
            places = [(table[b, p // 4] * 4 + p % 4).item() for p in range(10, 14)]
            assert slots[b].tolist() == places
        assert len(pages) == 2 * len(layers) and len({page.data_ptr() for page in pages}) == len(pages)
        assert arguments.of(name, 1, 1)[3].shape == (1, 3)
        assert arguments.of(name, 1, 1)[4] is pages, "graphs hold their addresses"


def test_programs_are_called_in_turn_after_a_warm_up(clock: Clock) -> None:
    programs = [clock.takes(2.0, "a"), clock.takes(3.0, "b")]
    assert time_in_turn(programs, (), replace(GRID, rounds=4, seconds_per_cell=1e9), DEVICE) == [[2] * 4, [3] * 4]
    assert clock.calls == ["a"] * 3 + ["b"] * 3 + ["a", "b"] * 4


def test_a_cell_ends_after_its_time_with_a_few_rounds_and_goes_on_while_calls_are_short(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def num_rounds(seconds: float) -> int:
        grid = replace(GRID, rounds=20, seconds_per_cell=10)
        return len(time_in_turn([clock.takes(seconds)], (), grid, DEVICE)[0])

    assert [num_rounds(s) for s in (0.25, 1.0, 100.0)] == [20, 10, 3]
    monkeypatch.setattr(program_calls, "LEAST_SECONDS", 8.0)
    assert num_rounds(0.25) == 32


def test_ratios_are_of_rounds_and_standings_geometric_means() -> None:
    cells = [Cell(dtype="float32", program=name, batch_size=1, tokens=1) for name in ("a", "b")]
    cells[0].add("onnx", [1.0, 2.0, 4.0, 8.0, 16.0], [2.0, 2.0, 16.0, 8.0, 8.0])  # 2, 1, 4, 1, 0.5
    cells[0].add("inductor", [1.0, 1.0, 1.0], [0.5, 0.25, 0.125])
    cells[1].add("onnx", [1.0] * 3, [0.25] * 3)
    cells[1].add("inductor", [1.0] * 3, [0.5] * 3)
    record = cells[0].record()
    assert record["eager_microseconds"] == 1.5e6 and record["num_eager_rounds"] == 8
    assert record["ratios"]["onnx"] == {"microseconds": 8e6, "median": 1, "low": 1, "high": 2, "num_rounds": 5}
    assert [cell.fastest for cell in cells] == ["inductor", "onnx"]
    (found,) = standings(cells).values()
    assert [tuple(one) for one in found] == [
        ("inductor", pytest.approx(0.125**0.5), 1),  # 0.25 and 0.5
        ("onnx", pytest.approx(0.5), 1),  # 1 and 0.25
        ("eager", 1, 0),
    ]
    text = verdict(cells)
    assert "inductor 0.35 (1), onnx 0.50 (1), eager 1.00 (0); take inductor, as backend='auto' does" in text
    cells[1].ratios["onnx"] = [0.01] * 3
    assert "take onnx, but backend='auto' takes inductor" in verdict(cells)


def test_each_program_is_compared_with_eagers_at_every_size(
    two_sets: Path, clock: Clock, loaders: dict[str, Any]
) -> None:
    load_eager, loaded = loaders["eager"], list[str]()

    def slow(backend: str, seconds: Callable[[str], float]) -> Callable[..., Any]:
        def load(*args: Any) -> dict[str, Any]:
            clock.now += 5
            loaded.append(backend)
            return {name: clock.takes(seconds(name), name, run) for name, run in load_eager(*args).items()}

        return load

    loaders["eager"] = slow("eager", lambda _: 4.0)
    loaders["inductor"] = slow("inductor", lambda name: 8.0 if name == "unembed" else 1.0)
    artifact = Artifact.open(two_sets)
    sets, left_out = choose_sets(artifact, "inductor", None, str(DEVICE))
    measured = measure(artifact, sets, GRID, enforce_eager=True)
    assert loaded == ["eager", "inductor"] and not left_out and not measured.left_out
    sizes = [(1, 1), (1, 4), (3, 1), (3, 4)]
    assert [(c.program, c.batch_size, c.tokens) for c in measured.cells] == [
        (n, *size) for n in NAMES for size in sizes
    ]
    assert {cell.program: cell.medians["inductor"] for cell in measured.cells} == {
        name: 2.0 if name == "unembed" else 0.25 for name in NAMES
    }
    first, second = measured.sets
    assert [one.load_seconds for one in measured.sets] == [5, 5]
    assert (second.max_error, second.max_error_tier) == (3e-7, "intermediate")
    folder = artifact.path / "programs" / second.name
    assert second.file_bytes == sum(file.stat().st_size for file in folder.iterdir())
    weights = sum(file.stat().st_size for file in (artifact.path / "weights" / "float32").iterdir())
    assert (first.shared_bytes, second.shared_bytes) == (weights, 0)
    (found,) = standings(measured.cells).values()
    assert [(one.backend, one.num_fastest) for one in found] == [("inductor", 28), ("eager", 4)]
    assert found[0].mean_ratio == pytest.approx((0.25**7 * 2) ** (1 / 8))


def test_command_prints_and_writes_all_figures(
    two_sets: Path, tmp_path: Path, loaders: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    output, markdown = tmp_path / "programs.json", tmp_path / "programs.md"
    args = ["bench", str(two_sets), "--programs", *SMALL, "--json", str(output), "--markdown", str(markdown)]
    assert main(args) == 0
    record = json.loads(output.read_text())
    assert record["machine"]["processor"] and record["grid"]["context"] == 10 and record["left_out"] == {}
    assert [one["backend"] for one in record["sets"]] == ["eager", "inductor"]
    assert len(record["rows"]) == 4 * len(NAMES)
    for row in record["rows"]:
        ratio = row["ratios"]["inductor"]
        assert row["eager_microseconds"] > 0 and row["num_eager_rounds"] == ratio["num_rounds"] >= 3
        assert 0 < ratio["low"] <= ratio["median"] <= ratio["high"]
        assert row["fastest"] == ("inductor" if ratio["median"] < 1 else "eager")
    assert {one["backend"] for one in record["standings"]["float32"]} == {"eager", "inductor"}

    tables = [line.split("|")[1:-1] for line in markdown.read_text().splitlines() if line.startswith("|")]
    calls, sets = tables[: 2 + 4 * len(NAMES)], tables[2 + 4 * len(NAMES) :]
    assert [cell.strip() for cell in calls[0]] == [
        "dtype", "program", "rows", "tokens", "eager, µs", "inductor ÷ eager", "fastest"
    ]  # fmt: skip
    assert all(len(row) == 7 for row in calls) and all(len(row) == 5 for row in sets) and len(sets) == 4
    assert sets[3][0].strip() == "inductor float32" and sets[3][4].strip() == "3.0e-07 (intermediate)"
    out = capsys.readouterr().out
    last = markdown.read_text().splitlines()[-1]
    assert last.startswith("Time ÷ eager's") and " ".join(last.split()) in " ".join(out.split())


def test_eager_alone_is_timed_too(artifact: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", str(artifact), "--programs", *SMALL, "--tokens", "2", "--dtype", "float32"]) == 0
    out = capsys.readouterr().out
    assert "float32: eager alone" in out and "÷ eager │" not in out and "fastest │" not in out
    assert sum("│ 2 " in " ".join(line.split()) for line in out.splitlines()) == 2 * len(NAMES)


def test_a_set_that_its_loader_refuses_is_named_and_left_out(
    two_sets: Path, loaders: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: Any) -> None:
        raise ValueError("needs a package")

    loaders["inductor"] = refuse
    assert main(["bench", str(two_sets), "--programs", *SMALL]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "Left out: inductor-" in out and "needs a package" in out and "eager alone" in out


def test_programs_of_another_pytorch_or_without_eager_are_left_out(artifact: Path, tmp_path: Path) -> None:
    older = Artifact.open(with_set(artifact, tmp_path / "older", torch_version="1.0.0"))
    sets, left_out = choose_sets(older, "auto", None, str(DEVICE))
    assert [one.build.backend for one in sets] == ["eager"]
    assert [(name.endswith("torch1.0.0"), "torch_version is 1.0.0" in why) for name, why in left_out.items()] == [
        (True, True)
    ]
    other = with_set(artifact, tmp_path / "other", backend="onnx")
    (eager,) = other.glob("programs/eager-*")
    shutil.rmtree(eager)
    write_manifest(other, Manifest.from_json((other / "hispec.json").read_text()))
    with pytest.raises(ValueError, match=r"no eager programs .* to compare with.* --backend inductor,eager"):
        choose_sets(Artifact.open(other), "auto", None, str(DEVICE))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--prompts", "x", "--strategies", "hispec"], "leave out --prompts, --strategies"),
        (["--profile"], "leave out --profile"),
        (["--temperature", "0.5", "--no-bitwise"], "leave out --bitwise, --temperature"),
        (["--backend", "onnx"], "no programs for backend='onnx'"),
        (["--dtype", "bfloat16"], "no eager programs for dtype='bfloat16'"),
        (["--device", "tpu"], "device='tpu'"),
        (["--tokens", "1,x"], "--tokens='1,x' must be whole numbers"),
        (["--tokens", "1,1"], "tokens=1,1 must differ"),
        (["--tokens", "0"], "tokens=0 must be at least 1"),
        (["--tokens", "65"], "tokens=65: the artifact allows at most 64"),
        (["--batch-sizes", "0"], "--batch-sizes=0 must be at least 1"),
        (["--batch-sizes", "1000"], "batch_sizes=1000: the artifact allows at most"),
        (["--context", "-1"], "context=-1 must be at least 0"),
        (["--context", "61"], "context=61 and tokens=4 need 65 positions, the artifact allows at most 64"),
        (["--rounds", "2"], "rounds=2 must be at least 3"),
        (["--seconds-per-cell", "nan"], "seconds_per_cell=nan must be above 0"),
        (["--markdown", "/no/such/folder/x.md"], "--markdown /no/such/folder/x.md: name a file"),
        (["--json", "/no/such/folder/x.json"], "/no/such/folder/x.json: name a file"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    artifact: Path, capsys: pytest.CaptureFixture[str], options: list[str], reason: str
) -> None:
    assert main(["bench", str(artifact), "--programs", *SMALL, *options]) == 2
    assert reason in capsys.readouterr().err


def test_options_of_programs_are_refused_without_it(artifact: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", str(artifact), "--tokens", "2", "--markdown", "x.md"]) == 2
    assert "--tokens, --markdown belongs to --programs" in capsys.readouterr().err


def test_records_hold_every_cell() -> None:
    measured = program_bench.Measured()
    cell = Cell(dtype="float32", program="unembed", batch_size=1, tokens=4, baseline_seconds=[1.0, 2.0, 3.0])
    measured.cells.append(cell)
    record = to_record(measured)
    assert record["rows"] == [
        {"dtype": "float32", "program": "unembed", "batch_size": 1, "tokens": 4, "eager_microseconds": 2e6,
         "num_eager_rounds": 3, "ratios": {}, "fastest": "eager"}
    ]  # fmt: skip
