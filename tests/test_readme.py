"""Every command and name that the README prints exists (read from its text, so that it can't drift)."""

import re
import shlex
from pathlib import Path

import pytest

import export.cli
import infer.cli
import train.cli
import train.generate

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
COMMANDS = re.findall(r"^python -m (\w+) (.+?)(?:\s{2,}#.*)?$", README, flags=re.MULTILINE)


def test_there_are_commands() -> None:
    assert {package for package, _ in COMMANDS} == {"train", "export", "infer"}


@pytest.mark.parametrize(("package", "rest"), COMMANDS)
def test_every_command_parses(package: str, rest: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    arguments = shlex.split(rest)
    if package == "export":
        export.cli._parser().parse_args(arguments)
    elif package == "infer":
        infer.cli._parser().parse_args(arguments)
    elif arguments[0] == "generate":
        train.generate.parse_options(arguments[1:])
    else:
        assert train.cli.main([*arguments, "--print_config"]) == 0


def test_every_flag_in_a_comment_exists() -> None:
    for flags in re.findall(r"#.*?(--dtype bfloat16 --autotune)", README):
        export.cli._parser().parse_args(["--checkpoint", "x", "--output", "y", *flags.split()])


@pytest.mark.parametrize("code", re.findall(r"```python\n(.+?)```", README, flags=re.DOTALL))
def test_python_compiles_and_its_names_exist(code: str) -> None:
    compile(code, "README.md", "exec")
    for module, names in re.findall(r"^from (\S+) import (.+)$", code, flags=re.MULTILINE):
        imported = __import__(module, fromlist=["_"])
        assert all(hasattr(imported, name.strip()) for name in names.split(","))
