"""Imports go one way, export → train → infer, and the runtime stays light (DESIGN §3)."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def imported_packages(source: str) -> set[str]:
    """Top-level names of everything that a module imports, at any depth of nesting."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module.split(".")[0])
    return names


@pytest.mark.parametrize(("package", "forbidden"), [("infer", {"train", "export", "lightning"}), ("train", {"export"})])
def test_nothing_imports_upward(package: str, forbidden: set[str]) -> None:
    files = sorted((ROOT / package).rglob("*.py"))
    assert files, f"{package} has no modules"
    upward = {str(file.relative_to(ROOT)): imported_packages(file.read_text()) & forbidden for file in files}
    assert not {file: names for file, names in upward.items() if names}


def test_imported_packages_sees_nested_and_dotted_imports() -> None:
    source = (
        "import train.heads as h\ndef f():\n    from export.tier import Trunk\nfrom . import x\nfrom .train import y\n"
    )
    assert imported_packages(source) == {"train", "export"}


def test_infer_imports_neither_lightning_nor_models() -> None:
    program = """
import sys
from infer import LLM, SamplingParams
heavy = {"lightning", "pytorch_lightning", "peft", "datasets", "train", "export"}
found = sorted(heavy & set(sys.modules))
found += sorted(m for m in sys.modules if m == "transformers.modeling_utils" or ".modeling_" in m and "models" in m)
print(",".join(found))
"""
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == ""
