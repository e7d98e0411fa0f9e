"""`--help` answers at once: it loads nothing heavy. Modules are counted and not seconds, as machines differ."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import train.cli

ROOT = Path(__file__).parents[1]
HEAVY = {"torch", "numpy", "transformers", "lightning", "datasets", "pandas", "pyarrow", "fastapi", "uvicorn", "rich"}
PROGRAM = """
import argparse, contextlib, importlib, io, sys
main, *arguments = sys.argv[1:]
for command in arguments:
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
        importlib.import_module(main).main([*command.split(), "--help"])
    assert text.getvalue().startswith("usage:"), (command, text.getvalue())
print(",".join(sorted({name.partition(".")[0] for name in sys.modules})))
"""


def loaded(main: str, *commands: str) -> set[str]:
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, main, *commands], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
    return set(result.stdout.strip().split(","))


def infer_commands() -> list[str]:
    return [
        "",
        *(
            name
            for file in (ROOT / "infer" / "commands").glob("*.py")
            for name in re.findall(r'commands\.add_parser\(\s*"([\w-]+)"', file.read_text())
        ),
    ]


@pytest.mark.parametrize(
    ("main", "commands"),
    [
        ("infer.cli", infer_commands()),
        ("export.cli", [""]),
        ("train.cli", ["", *train.cli.COMMANDS]),
        ("infer.integrations.ray", [""]),
        ("infer.integrations.ray_serve", [""]),
    ],
)
def test_help_loads_nothing_heavy(main: str, commands: list[str]) -> None:
    assert not loaded(main, *commands) & HEAVY


def test_every_infer_command_is_asked() -> None:
    assert {"", "chat", "generate", "serve", "plan", "bench", "check", "inspect"} <= set(infer_commands())
