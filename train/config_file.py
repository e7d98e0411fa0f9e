"""The section `model` of a training config, for commands that need its base and exits without Lightning's parser."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml


def model_section(path: Path) -> dict[str, Any]:
    """`model` of the YAML at `path`; its `base` is a name.

    Raises:
        ValueError: no such file, no YAML, or no model.base in it.
    """
    if not path.is_file():
        raise ValueError(f"--config {path}: no such file")
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"--config {path}: not YAML: {' '.join(str(error).split())}") from error
    section = content.get("model") if isinstance(content, dict) else None
    if not isinstance(section, dict) or not isinstance(section.get("base"), str):
        raise ValueError(f"--config {path}: model.base is missing; expected model: {{base: NAME, exits: [...]}}")
    return section
