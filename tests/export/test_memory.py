"""What `export.memory` counts, and that it hands on export's exit code."""

from __future__ import annotations

import subprocess
import sys

import pytest

from export.memory import held, main, process_tree

HOLDS = """
import subprocess, sys
block = bytearray(b"x" * 30_000_000)
code = "b = bytearray(b'x' * 50_000_000); print('ready', flush=True); input()"
child = subprocess.Popen([sys.executable, "-c", code],
                         stdin=subprocess.PIPE)
child.wait()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_what_processes_below_hold_counts_too() -> None:
    with subprocess.Popen([sys.executable, "-c", HOLDS], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
            found = held(process.pid)
            assert found.num_processes == 2
            assert 80e6 < found.shared_out <= found.resident < 140e6
        finally:
            for pid in _below(process.pid):
                subprocess.run(["kill", str(pid)], check=True)


def _below(pid: int) -> list[int]:
    return sorted(process_tree(pid), reverse=True)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_exports_own_exit_code_and_lines_are_handed_on(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["--checkpoint", "nowhere/at/all"]) == 2
    out, err = capfd.readouterr()
    assert "nothing to write" in err and "memory: " in out
