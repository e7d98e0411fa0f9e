"""What the distribution holds: our three packages with all sub-packages, the configs, nothing else."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
PACKAGES = ("train", "export", "infer")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def requirements(*extras: str) -> dict[str, Requirement]:
    project = PROJECT["project"]
    lines = project["dependencies"] + [line for extra in extras for line in project["optional-dependencies"][extra]]
    return {requirement.name: requirement for requirement in map(Requirement, lines)}


def pinned() -> dict[str, str]:
    lines = [line.split("#")[0].strip() for line in (ROOT / "constraints.txt").read_text().splitlines()]
    return dict(line.split("==") for line in lines if line)


def test_only_our_packages_are_found() -> None:
    setuptools = pytest.importorskip("setuptools")
    options = PROJECT["tool"]["setuptools"]["packages"]["find"]
    assert options["namespaces"] is False
    found = set(setuptools.find_packages(str(ROOT), include=options["include"]))
    assert {name.split(".")[0] for name in found} == set(PACKAGES)


@pytest.mark.parametrize("package", PACKAGES)
def test_every_folder_with_modules_is_a_package(package: str) -> None:
    folders = {file.parent for file in (ROOT / package).rglob("*.py")}
    assert folders, f"{package} has no modules"
    assert not [str(folder.relative_to(ROOT)) for folder in folders if not (folder / "__init__.py").is_file()]


def test_configs_are_shipped() -> None:
    assert PROJECT["tool"]["setuptools"]["data-files"] == {"share/hispec/configs": ["configs/*.yaml"]}
    assert list((ROOT / "configs").glob("*.yaml"))
    assert not list((ROOT / "configs").rglob("*.py"))


def test_malicious_lightning_releases_are_excluded() -> None:
    lightning = requirements()["lightning"].specifier
    assert not any(version in lightning for version in ("2.6.2", "2.6.3"))
    assert "2.6.4" in lightning


def test_tested_versions_are_exact_and_inside_the_ranges() -> None:
    versions = pinned()
    assert versions["torch"] == "2.13.0", "no local suffix: it would tie users to one build"
    assert all(re.fullmatch(r"[\w.]+", version) for version in versions.values())
    for name, requirement in requirements("dev").items():
        assert versions[name] in requirement.specifier, f"{name}=={versions[name]} is outside {requirement}"
    assert "torch-tensorrt" not in versions


def test_console_scripts_stand_in_for_shadowed_packages() -> None:
    assert PROJECT["project"]["scripts"] == {f"hispec-{name}": f"{name}.cli:main" for name in PACKAGES}


def test_every_extra_of_the_design_is_there() -> None:
    expected = {"onnx", "tensorrt", "structured", "serve", "ray", "plot", "gpu", "dev"}
    assert set(PROJECT["project"]["optional-dependencies"]) == expected


@pytest.mark.slow
def test_the_wheel_works_in_an_environment_of_its_own(tmp_path: Path) -> None:
    """Built, installed and called from another folder; dependencies are this environment's, as there is no network."""
    pytest.importorskip("setuptools", "77", reason="builds the wheel: pip install 'setuptools>=77'")
    source, wheels, venv = tmp_path / "source", tmp_path / "wheels", tmp_path / "venv"
    for name in (*PACKAGES, "configs"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "heads", "data"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip = ["-m", "pip", "--disable-pip-version-check", "--quiet"]
    run(sys.executable, *pip, "wheel", str(source), "--no-deps", "--no-build-isolation", "--wheel-dir", str(wheels))
    (wheel,) = wheels.glob("hispec-*.whl")
    run(sys.executable, "-m", "venv", str(venv))
    python = venv / "bin" / "python"
    run(str(python), *pip, "install", "--no-deps", "--no-index", str(wheel))
    (packages,) = venv.glob("lib/python*/site-packages")
    (packages / "theirs.pth").write_text(f"{sysconfig.get_path('purelib')}\n")  # behind the wheel's own files
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for name in PACKAGES:
        assert run(str(venv / "bin" / f"hispec-{name}"), "--help", cwd=elsewhere).startswith("usage:")
    assert "--max-queue" in run(str(venv / "bin" / "hispec-infer"), "serve", "--help", cwd=elsewhere)
    where = "import infer, infer.server, train; print(infer.__file__, train.__file__)"
    files = [Path(file) for file in run(str(python), "-c", where, cwd=elsewhere).split()]
    assert all(file.is_relative_to(venv) for file in files)
    assert (files[0].parent / "server" / "page.html").is_file()
    config = venv / "share" / "hispec" / "configs" / "smollm2-135m.yaml"
    assert config.read_text() == (ROOT / "configs" / "smollm2-135m.yaml").read_text()


def run(*command: str, cwd: Path | None = None) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout
