"""What --help prints without asking LightningCLI is what LightningCLI would say."""

import re
from pathlib import Path

import pytest

from train.cli import main
from train.lightning_cli import make_cli
from train.option_help import Option, read_options

SOURCE = """
class Given:
    \"\"\"Text.

    Args:
        first: one thing,
            told in two lines.
        last: 100 % of it.
    \"\"\"

    def __init__(self, first: Optional[Union[int, str]], second: "int" = 2, *, third: bool, last: str = "x") -> None:
        pass

class Fields:
    \"\"\"Text.

    Args:
        one: the first.
    \"\"\"

    one: int
    other: float | None = field(default=None, compare=False)

    @property
    def many(self) -> int:
        return 2
"""


def names(text: str) -> set[str]:
    """Options that are described, at a line's beginning; jsonargparse's own --x.help and --list+ are left out."""
    found = re.findall(r"^ +(?:-\w[^-\n]*, )?(--[\w.]+)(?=[ \n\[])", text, flags=re.MULTILINE)
    return {name for name in found if not name.endswith(".help")}


@pytest.mark.parametrize("command", ["fit", "validate"])
def test_every_option_of_lightning_cli_is_told(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        make_cli([command, "--help"], run=False)
    expected = names(capsys.readouterr().out)
    assert main([command, "--help"]) == 0
    told = names(capsys.readouterr().out)
    assert {"--model.base", "--data.train_files", "--trainer.max_epochs", "--ckpt_path", "--config"} <= told
    assert told == expected - {"--help", "--data", "--model", "--trainer"} | {"--help"}


def test_defaults_and_texts_are_the_sources_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lint", "-h"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "usage: python -m train lint --config FILE" in text
    assert "--data.max_length int rows are cut after so many tokens (counted and told). (default: 512)" in text
    assert "context: int with more than 0 the head also reads" in text, "a key of model.exits"


def test_options_are_read_from_a_source(tmp_path: Path) -> None:
    file = tmp_path / "source.py"
    file.write_text(SOURCE)
    assert read_options(file, "Given") == [
        Option("first", "int | str | None", None, "one thing, told in two lines."),
        Option("second", "int", "2", ""),
        Option("third", "bool", None, ""),
        Option("last", "str", "'x'", "100 % of it."),
    ]
    assert read_options(file, "Fields") == [
        Option("one", "int", None, "the first."),
        Option("other", "float | None", "None", ""),
    ]
    file.write_text(SOURCE.replace("one: the first.", ""))  # a section without entries, which the parser refuses
    assert read_options(file, "Fields")[0] == Option("one", "int", None, "")


def test_estimate_tells_its_own_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", "--help"]) == 0
    assert "--tflops" in capsys.readouterr().out
