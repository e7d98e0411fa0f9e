"""What the distribution holds: our three packages with all sub-packages, the configs, nothing else."""

import re
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
