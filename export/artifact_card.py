"""The model card of an artifact: README.md on the hub, out of the artifact's own records."""

from __future__ import annotations

import yaml

from infer.artifact import Artifact
from infer.artifact_report import read_parity

TAG = "hispec"


def artifact_card(artifact: Artifact, repo: str) -> str:
    """With the hub's metadata on top.

    Args:
        repo: the id under which it will be found.
    """
    manifest = artifact.manifest
    exits = {e.name: e for e in manifest.exits}
    lines = [
        f"# {manifest.base.name}, exported for HiSpec",
        "",
        f"`{manifest.base.name}` in {len(manifest.tiers)} tiers of compiled programs, for self-speculative decoding "
        "with the same tokens as plain decoding.",
        "",
        "| tier | layers | head | ids it can pick |",
        "|---|---|---|---|",
    ]
    for tier in manifest.tiers:
        exit_ = exits[tier.exit]
        size = exit_.vocab_size or manifest.base.vocab_size
        lines.append(f"| {tier.name} | {tier.start}–{tier.stop} | {exit_.head} | {size} |")
    lines += ["", "| programs | built for |", "|---|---|"]
    for programs in artifact.programs():
        build = programs.build
        where = build.gpu_name or f"{build.machine} {build.cpu_capability}"
        lines.append(f"| `{build.folder_name}` | {where}, {build.num_threads} threads |")
    kept = [(name, one) for name, found in (read_parity(artifact).get("acceptance") or {}).items() for one in found]
    if kept:
        lines += ["", "| programs | exit | text | mean acceptance length | promised |", "|---|---|---|---|---|"]
        for name, one in kept:
            text = "validation's" if one["by"] == "programs" else "the engine's"
            lengths = f"{one['found']['length']:.2f} | {one['expected']['length']:.2f}"
            lines.append(f"| `{name}` | {one['exit']} | {text} | {lengths} |")
    lines += [
        "",
        "```python",
        "from infer import LLM, SamplingParams",
        "",
        f'llm = LLM("{repo}", strategy="{"layerskip" if len(manifest.tiers) > 1 else "autoregressive"}")',
        'outputs = llm.generate("The capital of France is", SamplingParams(temperature=0, max_tokens=64))',
        "print(outputs[0].outputs[0].text)",
        "```",
        "",
        "Programs of another processor, GPU or PyTorch are refused with the command that builds them. They are code, "
        "which `LLM` runs.",
        "",
    ]
    base = manifest.base.name
    metadata = {"library_name": TAG, "pipeline_tag": "text-generation", "tags": [TAG, "speculative-decoding"]}
    if base.count("/") == 1 and not base.startswith((".", "/", "~")):
        metadata["base_model"] = base
    return f"---\n{yaml.safe_dump(metadata, sort_keys=False)}---\n\n" + "\n".join(lines)
