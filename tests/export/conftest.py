"""Tiny early-exit models and their artifacts, made once per session."""

from collections.abc import Callable
from pathlib import Path

import pytest

import export  # noqa: F401  sets MKL's mode before MKL starts
from export import bitwise
from export.writer import ExportOptions, write_artifact
from infer import backends
from infer.artifact import Artifact
from tests.export.tiny_exits import ALL_HEADS, make_early_exit
from tests.tiny_engine import DEVICE
from train.heads import ExitConfig
from train.model import EarlyExitModel


class Exported:
    """A tiny model, its artifact, and the programs as the runtime loads them."""

    def __init__(self, model: EarlyExitModel, folder: Path, backend: str) -> None:
        self.model = model
        self.artifact = Artifact.open(folder)
        self.program_set = self.artifact.select(backend, device=str(DEVICE))
        self.infos = self.program_set.build.programs
        self.programs = backends.load(self.artifact, self.program_set)


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Exported]:
    """`exported(family, backend)`: exported once per session; eager with every kind of head, inductor with one exit."""
    made: dict[tuple[str, str], Exported] = {}

    def make(family: str, backend: str) -> Exported:
        if (family, backend) not in made:
            if backend == "eager":
                model = make_early_exit(family, ALL_HEADS)
            else:
                exits = [ExitConfig(name="draft", layer=1, head="layer", vocab_size=32)]
                layer_types = {"layer_types": ["sliding_attention", "full_attention"]} if family == "gemma3" else {}
                model = make_early_exit(family, exits, num_hidden_layers=2, **layer_types)
            folder = tmp_path_factory.mktemp("artifacts") / f"{family}-{backend}"
            options = ExportOptions(output=folder, backends=(backend,), device=str(DEVICE))
            with pytest.MonkeyPatch.context() as patch:  # sizes are measured, not required, and would take most time
                patch.setattr(bitwise, "SHAPES", bitwise.SHAPES[:4])
                write_artifact(lambda dtype: model, None, options)
            made[family, backend] = Exported(model, folder, backend)
        return made[family, backend]

    return make
