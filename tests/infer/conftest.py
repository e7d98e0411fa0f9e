"""What several files of the runtime's tests begin with."""

from pathlib import Path

import pytest

from tests.tiny_artifact import make_artifact


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny artifact, in a folder of the file's own."""
    return make_artifact(tmp_path_factory.mktemp("artifact") / "artifact")
