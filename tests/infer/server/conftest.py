"""One artifact and two engines for all files of this folder: loading takes longer than most tests."""

from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="needs the extra `serve`")

from infer.llm import LLM
from tests.tiny_artifact import load, make_artifact


@pytest.fixture(scope="session")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_artifact(tmp_path_factory.mktemp("served") / "artifact")


@pytest.fixture(scope="session")
def llm(artifact: Path) -> LLM:
    return load(artifact, "hispec")


@pytest.fixture(scope="session")
def narrow(artifact: Path) -> LLM:
    """Runs one text at a time."""
    return load(artifact, "hispec", max_num_seqs=1)


@pytest.fixture(scope="session")
def reference(artifact: Path) -> LLM:
    """What texts must be: plain decoding, by an engine that no server's thread steps."""
    return load(artifact, "autoregressive")
