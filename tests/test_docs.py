"""Every command and every Python block of README.md and docs/, run as it stands, in a workspace whose files of the same
names are tiny: the model, its exits, the prompts. Quick tests: they parse, what they name exists. Slow ones: they run.
"""

from __future__ import annotations

import importlib
import io
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import export.cli
import infer.cli
import infer.integrations.ray_serve
import train.cli
import train.generate
from tests.conftest import ROOT

PAGES = ["README.md", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("*.md"))]
NAME = "smollm2-135m"
PORT = ":8000"  # what the pages say; the test's server has another
NOT_RUN = {  # of docs/deploy.md
    "docker": "there is no Docker here; tests/test_deploy.py looks at what it is given",
    "kubectl": "there is no cluster here; tests/test_deploy.py looks at what it is given",
    "sbatch": "there is no SLURM here; tests/test_deploy.py runs the job's script with stand-ins",
    "deploy/torchrun.sh": "tests/test_deploy.py runs it on two processes",
    "lm_eval": "tests/infer/server/test_ecosystem.py runs it, where it is installed",
}
RAY_SERVE = "serve run infer.integrations.ray_serve:app "


def blocks(page: str) -> list[tuple[str, str]]:
    """(language, content) of the page's fenced blocks."""
    return re.findall(r"^```(\w*)\n(.*?)^```", (ROOT / page).read_text(), flags=re.MULTILINE | re.DOTALL)


def commands(page: str) -> list[str]:
    """The lines of its shell blocks, without comments at their ends."""
    return [command for language, text in blocks(page) if language == "bash" for command in commands_of(text)]


def program_of(command: str) -> str:
    """The first word but for variables that are set before it."""
    return next(word for word in shlex.split(command) if not re.match(r"[A-Z]+=", word))


def commands_of(text: str) -> list[str]:
    """Of a shell block; lines that begin with a space or # are comments on those before."""
    return [re.sub(r"\s{2,}#.*", "", line) for line in text.splitlines() if line.strip() and line[0] not in "# "]


ALL = [(page, command) for page in PAGES for command in commands(page)]


# ---- quick ----


def parse(package: str, arguments: list[str]) -> None:
    if package == "train" and arguments[0] == "generate":
        train.generate.parse_options(arguments[1:])
    elif package == "train":
        assert train.cli.main([*arguments, "--print_config"]) == 0
    else:
        module = {"export": export.cli, "infer": infer.cli}.get(package) or importlib.import_module(package)
        module._parser().parse_args(arguments)


@pytest.mark.parametrize(("page", "command"), ALL)
def test_every_command_parses(page: str, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    words = shlex.split(command.rpartition("| ")[2])
    if words[0] == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
        assert set(words[1:]) <= set(targets)
    elif program_of(command) in NOT_RUN:
        files = [word for word in words if word.startswith(("deploy/", "configs/"))]
        assert all(Path(word).is_file() for word in files), command
    elif command.startswith(RAY_SERVE):
        infer.integrations.ray_serve.parse(dict(word.split("=") for word in words[3:]))
    else:
        assert words[:2] == ["python", "-m"], f"{page}: neither make nor python -m: {command}"
        parse(words[2], words[3:])


@pytest.mark.parametrize("page", PAGES)
def test_shell_blocks_say_that_they_are(page: str) -> None:
    """So that no command hides in a block that nobody runs."""
    for language, text in blocks(page):
        programs = "|".join(map(re.escape, ("python -m", "make", "pip", "curl", "serve", *NOT_RUN)))
        assert language == "bash" or not re.search(rf"^({programs}) ", text, flags=re.MULTILINE), text
        assert language in ("bash", "python", ""), f"{page}: a block of {language!r}"


@pytest.mark.parametrize("page", [*PAGES, "SECURITY.md"])
def test_links_lead_somewhere(page: str) -> None:
    for link in re.findall(r"\]\(([^)#]+)\)", (ROOT / page).read_text()):
        if not link.startswith("https://"):
            assert (ROOT / page).parent.joinpath(link).exists(), f"{page}: {link}"


@pytest.mark.parametrize("page", [*PAGES, "SECURITY.md"])
def test_files_of_ours_that_are_named_exist(page: str) -> None:
    for name in re.findall(r"`((?:configs|tests|infer|train|export|deploy)/[\w/.-]+\.\w+)`", (ROOT / page).read_text()):
        assert (ROOT / name).exists(), f"{page}: {name}"


@pytest.mark.parametrize(("page", "code"), [(p, text) for p in PAGES for kind, text in blocks(p) if kind == "python"])
def test_python_compiles_and_its_names_exist(page: str, code: str) -> None:
    compile(code, page, "exec")
    for module, names in re.findall(r"^from (\S+) import (.+)$", code, flags=re.MULTILINE):
        imported = __import__(module, fromlist=["_"])
        assert all(hasattr(imported, name.strip()) for name in names.split(","))


def test_the_readme_stays_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


# ---- slow: run ----

CONFIG = """
seed_everything: 0
model:
  base: {base}
  exits:
    - {{name: draft, layer: 2, head: linear_layer, vocab_size: 200, context: 5}}
    - {{name: intermediate, layer: 4, head: layer, vocab_size: 200, context: 5}}
data: {{train_files: rows.jsonl, val_files: held-out.jsonl, max_length: 64, batch_size: 2}}
trainer:
  accelerator: cpu
  max_epochs: 1
  enable_progress_bar: false
  default_root_dir: runs/{name}
"""


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory, tiny_model: Callable) -> Path:
    """What the pages take for granted, under the names that they use: config, prompts, trained exits, an artifact."""
    from tests.train.conftest import save_base

    folder = tmp_path_factory.mktemp("docs")
    save_base(folder / "base", tiny_model, "llama")
    (folder / "configs" / "data").mkdir(parents=True)
    (folder / "configs" / f"{NAME}.yaml").write_text(CONFIG.format(base=folder / "base", name=NAME))
    for file, numbers in (("rows.jsonl", range(12)), ("held-out.jsonl", range(12, 20))):
        rows = [{"prompt": f"a{n} snow?", "response": f"so slow {n} now, and the answer is slow"} for n in numbers]
        (folder / file).write_text("".join(json.dumps(row) + "\n" for row in rows))
    prompts = [{"id": f"p{n}", "prompt": f"snow {n}"} for n in range(3)]
    (folder / "configs" / "data" / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert train.cli.main(["fit", "--config", f"configs/{NAME}.yaml", "--trainer.logger", "false"]) == 0
        shutil.copytree(f"runs/{NAME}/heads", f"configs/heads/{NAME}")
        arguments = ["--checkpoint", f"runs/{NAME}/heads", "--output", f"artifacts/{NAME}", "--backend", "eager"]
        assert export.cli.main(arguments) == 0
    return folder


SERVE_ON_PORT = """
import signal, sys
import ray
from ray import serve
from ray.serve.scripts import cli
ray.init(include_dashboard=False)
signal.signal(signal.SIGTERM, signal.default_int_handler)
serve.start(http_options={"port": int(sys.argv.pop(1))})
cli()
"""


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f":{probe.getsockname()[1]}"


class Shell:
    """Runs a page's commands; a server goes on until the page ends."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._folder, self._monkeypatch, self.server = folder, monkeypatch, None
        self.port = free_port()

    def run(self, command: str) -> None:
        command = command.replace(PORT, self.port).replace(f"--port {PORT[1:]}", f"--port {self.port[1:]}")
        if command.startswith("make ") or program_of(command) in NOT_RUN:
            return  # make's recipes are commands like these, at the model's full size
        if "|" in command:
            line = re.sub(r"\bpython\b", shlex.quote(sys.executable), command)
            subprocess.run(["bash", "-o", "pipefail", "-c", line], check=True, env=self._environment(), timeout=300)
            return
        package, *arguments = shlex.split(command)[2:]
        if package.startswith("infer.integrations."):
            pytest.importorskip("ray", reason="needs the extra `ray`")
        if command.startswith(RAY_SERVE):
            self.close()
            self.port = free_port()  # Serve's command has no option for it: it takes a running Serve as it is
            self._serve(["-c", SERVE_ON_PORT, self.port[1:], "run", package, *arguments])
            return
        if package == "infer.integrations.ray_serve" or (package, arguments[0]) == ("infer", "serve"):
            self._serve(["-m", package, *arguments])
            return
        if package == "infer.integrations.ray":
            subprocess.run(
                [sys.executable, "-m", package, *arguments], check=True, env=self._environment(), timeout=300
            )
            return
        if (package, arguments[0]) == ("infer", "chat"):
            self._monkeypatch.setattr(sys, "stdin", io.StringIO("snow\n/stats\n"))
        if package == "export" and "--backend" not in arguments:
            arguments += ["--backend", "eager"]  # compiling takes minutes on a busy machine; tests/export do it
        main = {"train": train.cli, "export": export.cli, "infer": infer.cli}[package].main
        assert main(arguments) == 0, command

    def python(self, code: str) -> None:
        exec(compile(code.replace(PORT, self.port), "docs", "exec"), {"__name__": "docs"})

    def close(self) -> None:
        if self.server is not None:
            self.server.terminate()
            assert self.server.wait(60) == 0
            self.server = None

    def _environment(self) -> dict[str, str]:
        return os.environ | {"PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0"}

    def _serve(self, arguments: list[str]) -> None:
        self.server = subprocess.Popen([sys.executable, *arguments], env=self._environment())
        deadline = time.monotonic() + 400  # two engines behind Ray take minutes on a busy machine
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1{self.port}/ready", timeout=5)
                return
            except OSError:
                assert self.server.poll() is None and time.monotonic() < deadline, "the server did not start"
                time.sleep(0.3)


@pytest.fixture
def shell(prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shell]:
    folder = shutil.copytree(prepared, tmp_path / "workspace")
    monkeypatch.chdir(folder)
    one = Shell(folder, monkeypatch)
    yield one
    one.close()


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_every_command_and_python_block_runs(page: str, shell: Shell) -> None:
    output = f"--output artifacts/{NAME}"
    if any(command.endswith(output) for command in commands(page)):  # the page makes it itself
        shutil.rmtree(f"artifacts/{NAME}")
    for language, text in blocks(page):
        if language == "python":
            shell.python(text)
        for command in commands_of(text) if language == "bash" else ():
            shell.run(command)
