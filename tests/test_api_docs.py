"""docs/api.md is what the docstrings say now."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

import infer

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def make_api() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_api", ROOT / "docs" / "make_api.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_up_to_date(make_api: ModuleType) -> None:
    assert make_api.PAGE.read_text("utf-8") == make_api.page(), "run `make docs`"


def test_every_public_name_stands_in_it(make_api: ModuleType) -> None:
    page = make_api.page()
    assert [name for name in infer.__all__ if f"### `infer.{name}`" not in page] == []


def test_what_a_source_says_becomes_text(make_api: ModuleType, tmp_path: Path) -> None:
    file = tmp_path / "source.py"
    file.write_text(
        "class Both:\n"
        '    """First line,\n    and its end.\n\n    More.\n\n    Args:\n        a: told\n            on two lines.\n'
        '\n    Raises:\n        ValueError: sometimes.\n    """\n\n'
        "    def __init__(self, a: int, *, b: str = 'x') -> None: ...\n"
        "    @property\n    def size(self) -> int:\n        'How many.'\n"
        "    def _hidden(self) -> None: ...\n\n"
        "class Record:\n    one: int  # the first\n    two: float = 2.0\n    'The second.'\n"
    )
    both = "\n".join(make_api._member(file, "Both", "module", True))
    assert "### `module.Both`" in both and "Both(a: int, *, b: str = 'x')" in both and "_hidden" not in both
    assert "First line,\nand its end.\n\nMore." in both and "- `a`: told on two lines." in both
    assert "- `ValueError`: sometimes." in both and "size: int" in both and "How many." in both
    record = "\n".join(make_api._member(file, "Record", "module", True))
    assert "- `one: int`: the first\n- `two: float = 2.0`: The second.\n" in record
