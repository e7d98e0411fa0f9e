"""docs/quick-start.ipynb runs from top to bottom over a tiny artifact: its cells here, and by Jupyter's own client."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.tiny_artifact import make_artifact

ROOT = Path(__file__).parents[1]
NOTEBOOK = ROOT / "docs" / "quick-start.ipynb"


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the artifact that the notebook names."""
    (tmp_path / "artifacts").mkdir()
    make_artifact(tmp_path / "artifacts" / "smollm2-135m")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def cells() -> list[dict[str, Any]]:
    return json.loads(NOTEBOOK.read_text("utf-8"))["cells"]


def test_it_is_kept_without_outputs() -> None:
    assert all(
        not cell["outputs"] and cell["execution_count"] is None for cell in cells() if cell["cell_type"] == "code"
    )


def test_its_cells_run_in_order(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}
    for cell in cells():
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), "notebook", "exec"), names)
    said = capsys.readouterr().out
    assert "mean acceptance length" in said and "equal tokens" in said
    assert names["llm"].strategy == "layerskip" and names["drafted"].metrics.tiers


@pytest.mark.slow
def test_jupyter_runs_it(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbclient = pytest.importorskip("nbclient", reason="pip install nbclient ipykernel")
    pytest.importorskip("ipykernel", reason="pip install nbclient ipykernel")
    import nbformat

    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(workspace)}}).execute()
    told = [out["text"] for cell in notebook.cells for out in cell.get("outputs", ()) if out["output_type"] == "stream"]
    assert any("equal tokens" in text for text in told)
