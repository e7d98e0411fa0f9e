"""Writes with our own engine and an artifact's target: tasks join and leave between its steps, so that it stays full.

Knows nothing of texts or rows.
"""

from __future__ import annotations

from pathlib import Path

from infer.llm import LLM
from infer.manifest import MANIFEST, Manifest
from infer.request import Request
from train.author import Task, Written
from train.base_model import config_sha256, load_config
from train.generate_options import GenerateOptions


class EngineAuthor:
    """An `LLM` whose tasks are its requests; a step is one round of its engine."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self.max_model_len: int | None = llm.manifest.limits.max_model_len
        self._tasks: dict[Request, Task] = {}

    @property
    def num_tasks(self) -> int:
        return len(self._tasks)

    def add(self, task: Task) -> None:
        request = self.llm.make_request(task.head, task.params, number=task.prompt.number)
        request.is_streamed = False
        self.llm.engine.add(request)
        self._tasks[request] = task

    def step(self) -> list[Written]:
        finished = [request for request in self.llm.engine.step() if request.is_finished]
        return [
            Written(
                self._tasks.pop(request),
                list(request.token_ids),
                str(request.stop_reason) if request.finish_reason == "error" else None,
            )
            for request in finished
        ]


def check_artifact(options: GenerateOptions) -> None:
    """Look at what the artifact says of itself, before `LLM` checks and loads it.

    Raises:
        ValueError: there is none, it has fewer rows than --batch_size, or was made of another base (told by the config,
            as everywhere).
    """
    assert options.artifact is not None
    manifest = read_manifest(options.artifact)
    if options.batch_size > manifest.limits.max_batch:
        raise ValueError(f"--batch_size={options.batch_size}: the artifact allows at most {manifest.limits.max_batch}")
    if options.base is not None:
        check_base(manifest, options.artifact, options.base, options.revision)


def read_manifest(artifact: Path) -> Manifest:
    """What the artifact says of itself, read without a look at its other files."""
    path = artifact / MANIFEST
    if not path.is_file():
        raise ValueError(f"--artifact {artifact}: no {MANIFEST} there; give a folder that `python -m export` wrote")
    return Manifest.from_json(path.read_text(encoding="utf-8"))


def check_base(manifest: Manifest, artifact: Path, base: str, revision: str | None) -> None:
    """ValueError unless the artifact was made of `base`."""
    if config_sha256(load_config(base, revision)) != manifest.base.config_sha256:
        raise ValueError(
            f"--artifact {artifact} was exported from {manifest.base.name!r}, whose config differs from that "
            f"of the base {base!r}: give that base's artifact, or --artifact alone"
        )
