"""Damaged files of all kinds: a reader refuses them with a ValueError, or reads what they hold, and does nothing else.

No other exception, no hang (hypothesis' deadline), no file written or changed. `HISPEC_FUZZ_EXAMPLES` is how many for
each reader in the slow test, which has more of them (RELIABILITY.md says what was run).
"""

from __future__ import annotations

import copy
import json
import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from infer.artifact import Artifact, write_manifest
from infer.manifest import MANIFEST, Manifest
from infer.package import PROGRAM_KEY, check_package
from infer.plan import Conditions, Plan
from infer.prompts import read_prompts
from infer.sprinter import FEATURES, Classifier
from infer.strategy import Policy
from tests.infer.test_plan import make_plan
from tests.infer.test_tampering import write_package
from tests.tiny_artifact import make_artifact
from train.formats import conversation, present
from train.rows import read_rows

FEW, MANY = 40, int(os.environ.get("HISPEC_FUZZ_EXAMPLES", "400"))
SECONDS = 20  # of one example; they take milliseconds, but on a busy machine

Edit = tuple[float, int, bytes]  # where, as a share of the length; how many bytes go; what comes
edits = st.lists(st.tuples(st.floats(0, 1), st.integers(0, 40), st.binary(max_size=12)), min_size=1, max_size=4)
scalars = (
    st.none() | st.booleans() | st.integers(-3, 70) | st.sampled_from([2**31, 2**63, -(2**70), 10**100])
    | st.floats() | st.text(max_size=8)
    | st.sampled_from(["", "../x", "/etc/passwd", "a\x00b", "\ud800", "draft", "float32", "x" * 5000])
)  # fmt: skip
values = st.recursive(scalars, lambda v: st.lists(v, max_size=3) | st.dictionaries(st.text(max_size=6), v, max_size=3))
deep = st.sampled_from(["[" * 100_000, '{"a":' * 50_000, "[" * 2000 + "]" * 2000])


def damaged(content: bytes, how: list[Edit]) -> bytes:
    for share, gone, new in how:
        at = int(share * len(content))
        content = content[:at] + new + content[at + gone :]
    return content


@st.composite
def changed(draw: st.DrawFn, record: Any) -> str:
    """The JSON of `record` with some values replaced, keys removed, doubled or renamed: mostly still JSON."""
    record = copy.deepcopy(record)
    for _ in range(draw(st.integers(1, 3))):
        place, key = record, None
        while isinstance(place, (dict, list)) and place:
            keys = list(place) if isinstance(place, dict) else range(len(place))
            above, key = place, draw(st.sampled_from(list(keys)))
            place = above[key]
            if draw(st.integers(0, 2)) == 0:
                break
        if key is None:
            break
        what = draw(st.sampled_from(["replace", "replace", "remove", "swap", "rename"]))
        if what == "remove":
            del above[key]
        elif what == "swap" and isinstance(above, dict):
            other = draw(st.sampled_from(list(above)))
            above[key], above[other] = above[other], above[key]
        elif what == "rename" and isinstance(above, dict):
            above[draw(st.text(max_size=9))] = above.pop(key)
        else:
            above[key] = draw(values)
    return json.dumps(record)


def texts_of(record: Any) -> st.SearchStrategy[str]:
    plain = json.dumps(record).encode()
    return (
        changed(record) | changed(record) | deep | edits.map(lambda how: damaged(plain, how).decode(errors="replace"))
    )


def refused_or_read(read: Callable[[], object]) -> bool:
    """Whether it was read; any exception but ValueError fails the test. ValueErrors say something."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            read()
        except ValueError as error:
            assert str(error)
            return False
    return True


def state_of(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(p.relative_to(folder)): (p.stat().st_size, p.stat().st_mtime_ns) for p in folder.rglob("*")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_artifact(tmp_path_factory.mktemp("fuzz") / "artifact")


# ---- the readers ----


def fuzz_manifest(folder: Path, data: st.DataObject) -> None:
    whole = (folder / MANIFEST).read_text()
    try:
        (folder / MANIFEST).write_bytes(data.draw(texts_of(json.loads(whole))).encode(errors="replace"))
        before = state_of(folder.parent)
        refused_or_read(lambda: Artifact.open(folder).programs())
        assert state_of(folder.parent) == before
    finally:
        (folder / MANIFEST).write_text(whole)


def fuzz_build_with_right_hashes(folder: Path, data: st.DataObject) -> None:
    """As somebody would who can write hispec.json too."""
    (built,) = Artifact.open(folder).programs()
    path, manifest = built.path / "build.json", (folder / MANIFEST).read_text()
    whole = path.read_text()
    try:
        path.write_bytes(data.draw(texts_of(json.loads(whole))).encode(errors="replace"))
        write_manifest(folder, Manifest.from_json(manifest))
        before = state_of(folder.parent)
        refused_or_read(lambda: Artifact.open(folder).select("eager", "float32"))
        assert state_of(folder.parent) == before
    finally:
        path.write_text(whole)
        (folder / MANIFEST).write_text(manifest)


def fuzz_any_file(folder: Path, data: st.DataObject) -> None:
    """Whatever differs from what was recorded, in any file, is refused, always."""
    names = sorted(n for n in Manifest.from_json((folder / MANIFEST).read_text()).files)
    path = folder / data.draw(st.sampled_from(names))
    whole = path.read_bytes()
    new = damaged(whole, data.draw(edits))
    try:
        path.write_bytes(new)
        assert refused_or_read(lambda: Artifact.open(folder)) == (new == whole), path
    finally:
        path.write_bytes(whole)


def fuzz_package(folder: Path, data: st.DataObject) -> None:
    scratch = folder.parent / "package"
    scratch.mkdir(exist_ok=True)
    path = scratch / "draft.trunk.pt2"
    write_package(path, "draft.trunk")
    whole = path.read_bytes()
    assert PROGRAM_KEY.encode() in whole
    path.write_bytes(damaged(whole, data.draw(edits)))
    before = state_of(folder.parent)
    refused_or_read(lambda: check_package(path, "draft.trunk"))
    assert state_of(folder.parent) == before


def fuzz_plan(folder: Path, data: st.DataObject) -> None:
    artifact = Artifact.open(folder)
    (built,) = artifact.programs()
    conditions = Conditions.here(artifact, built.build, bitwise=True, cuda_graphs=False, verification="identity")
    plan = make_plan(conditions, (1, "layerskip", Policy()), (4, "autoregressive", Policy()))
    record = json.loads(plan.to_json())
    text = data.draw(texts_of(record))
    refused_or_read(lambda: Plan.from_json(text, artifact.manifest))


def fuzz_classifier(folder: Path, data: st.DataObject) -> None:
    many = [0.5] * len(FEATURES)
    whole = Classifier(
        artifact_sha256="0" * 64, feature_names=list(FEATURES), means=many, scales=many, weights=many, bias=0.0,
        threshold=0.5, num_samples=3, settings=[],
    )  # fmt: skip
    text = data.draw(texts_of(json.loads(whole.to_json())))
    refused_or_read(lambda: Classifier.from_json(text))


ROWS: list[Any] = [
    {"messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi."}]},
    {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}], "system": "s"},
    {"prompt": "p", "response": "r"},
    {"text": "t", "id": 3},
    {"turns": ["one", "two"], "reference": "#### 4"},
]


def fuzz_lines(folder: Path, data: st.DataObject) -> None:
    """Training text and prompts, as JSON lines, one JSON list, plain text or Parquet."""
    scratch = folder.parent / "rows"
    scratch.mkdir(exist_ok=True)
    suffix = data.draw(st.sampled_from([".jsonl", ".json", ".txt", ".parquet"]))
    path = scratch / f"rows{suffix}"
    if suffix == ".parquet":
        pa.parquet.write_table(pa.Table.from_pylist(ROWS[:1] * 3), path)
        content = path.read_bytes()
    else:
        rows = [data.draw(changed(row)) for row in data.draw(st.lists(st.sampled_from(ROWS), min_size=1, max_size=3))]
        content = ("[" + ",".join(rows) + "]" if suffix == ".json" else "\n".join(rows)).encode(errors="replace")
    if suffix == ".parquet" or data.draw(st.booleans()):
        content = damaged(content, data.draw(edits))
    path.write_bytes(content)
    before = state_of(folder.parent)

    def train_rows() -> None:
        for row in read_rows(str(path)):
            if not isinstance(row.content, ValueError):
                refused_or_read(lambda content=row.content: _train_row(content))  # type: ignore[misc]

    refused_or_read(train_rows)
    refused_or_read(lambda: read_prompts(path))
    assert state_of(folder.parent) == before


def _train_row(content: Any) -> None:
    found = present(content)
    if "messages" in found or "conversations" in found:
        conversation(found)


READERS = [
    fuzz_manifest,
    fuzz_build_with_right_hashes,
    fuzz_any_file,
    fuzz_package,
    fuzz_plan,
    fuzz_classifier,
    fuzz_lines,
]


def _run(reader: Callable[[Path, st.DataObject], None], folder: Path, num_examples: int) -> None:
    @settings(
        max_examples=num_examples,
        deadline=1000 * SECONDS,
        suppress_health_check=list(HealthCheck),
        database=None,
    )
    @given(data=st.data())
    def run(data: st.DataObject) -> None:
        reader(folder, data)

    run()
    shutil.rmtree(folder.parent / "package", ignore_errors=True)
    shutil.rmtree(folder.parent / "rows", ignore_errors=True)


@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.__name__)
def test_a_damaged_file_is_refused_in_words_or_read(reader, folder):
    _run(reader, folder, FEW)


@pytest.mark.slow
@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.__name__)
def test_many_damaged_files_are_refused_in_words_or_read(reader, folder):
    _run(reader, folder, MANY)
