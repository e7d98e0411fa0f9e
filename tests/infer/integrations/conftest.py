"""One local Ray for the tests of this folder that need it; workers import this checkout."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from infer.llm import LLM
from tests.tiny_artifact import load, make_artifact


@pytest.fixture(scope="session")
def shared_artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_artifact(tmp_path_factory.mktemp("shared") / "tiny")


@pytest.fixture(scope="session")
def reference(shared_artifact: Path) -> LLM:
    """What texts must be: plain decoding in this process."""
    return load(shared_artifact, "autoregressive")


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    ray = pytest.importorskip("ray", reason="needs the extra `ray`")
    from infer.integrations.cluster import _runtime_env

    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")  # says nothing to anybody
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=200 << 20,
        runtime_env=_runtime_env(),
    )
    yield
    ray.shutdown()
