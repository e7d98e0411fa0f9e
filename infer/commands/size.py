"""`python -m infer size`: how many replicas, how large a batch, how much memory a load takes, with the arithmetic."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from infer.artifact import Artifact, ProgramSet
    from infer.plan import Plan


def add(commands: Any) -> None:
    parser = commands.add_parser("size", help="replicas, batch, KV blocks and memory for a load, with the arithmetic")
    parser.add_argument(
        "artifact", help="folder that `python -m export` wrote; its plan.json says what speculation brings"
    )
    parser.add_argument("--requests-per-second", type=float, required=True, help="of all clients together")
    parser.add_argument("--prompt-tokens", type=int, required=True, help="of a request, on average")
    parser.add_argument("--new-tokens", type=int, required=True, help="of a request, on average")
    parser.add_argument(
        "--plain-tokens-per-second",
        required=True,
        metavar="BATCH:SPEED,…",
        help="plain decoding on one such machine at each batch size, e.g. 1:40,4:110,16:250: the column tokens/s of "
        "`python -m infer bench ARTIFACT --prompts FILE --batch-sizes 1,4,16`",
    )
    parser.add_argument(
        "--utilization", type=float, default=0.7, help="share of its speed at which a replica shall run (default 0.7)"
    )
    parser.add_argument("--max-seconds", type=float, help="that a request may take once it runs (default: any time)")
    parser.add_argument("--backend", help="of the programs; default: the plan's, or the best that the artifact has")
    parser.add_argument("--dtype", help="of the programs; default: the plan's, or the artifact's first")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    import torch

    from infer.artifact import Artifact
    from infer.sizing import Load, choose, explain, replicas

    load = Load(
        requests_per_second=args.requests_per_second,
        prompt_tokens=args.prompt_tokens,
        new_tokens=args.new_tokens,
        utilization=args.utilization,
        max_seconds=args.max_seconds,
    )
    speeds = _speeds(args.plain_tokens_per_second)
    artifact = Artifact.open(args.artifact)
    plan = _plan(artifact)
    build = _programs(artifact, plan, args.backend, args.dtype).build
    found = replicas(
        artifact.manifest,
        plan,
        speeds,
        load,
        weight_bytes=sum(program.weight_bytes for program in build.programs.values()),
        itemsize=getattr(torch, build.dtype).itemsize,
    )
    chosen = choose(found, load)
    print(f"{artifact.manifest.base.name}, {build.backend} {build.dtype} on {build.device}")
    for what, formula in explain(chosen, load):
        print(f"{what:<16} {formula}")
    return 0


def _speeds(text: str) -> dict[int, float]:
    try:
        pairs = [part.split(":") for part in text.split(",")]
        speeds = {int(batch_size): float(speed) for batch_size, speed in pairs}
    except ValueError:
        raise ValueError(
            f"--plain-tokens-per-second={text!r} must be pairs of batch size and speed, e.g. 1:40,4:110"
        ) from None
    if len(speeds) < len(pairs):
        raise ValueError(f"--plain-tokens-per-second={text!r} names a batch size twice")
    return speeds


def _plan(artifact: Artifact) -> Plan | None:
    """The artifact's, on whichever machine it was made: this one need not be the one that serves."""
    from infer.artifact import PLAN
    from infer.plan import PLAN_AGAIN, Plan

    path = artifact.path / PLAN
    if not path.exists():
        print(f"notice: no {PLAN}, so plain decoding is sized: {PLAN_AGAIN}", file=sys.stderr)
        return None
    plan = Plan.from_json(path.read_text(encoding="utf-8"), artifact.manifest)
    made_on = plan.conditions
    if made_on.artifact_sha256 != artifact.manifest_sha256:
        raise ValueError(f"{path} is of another export: remove it, or {PLAN_AGAIN}")
    print(f"plan: measured on {made_on.processor}, {made_on.num_threads} threads", file=sys.stderr)
    return plan


def _programs(artifact: Artifact, plan: Plan | None, backend: str | None, dtype: str | None) -> ProgramSet:
    """Which would be served; not whether they run here."""
    from infer.artifact import AUTO_ORDER

    made_on = plan.conditions if plan else None
    backend = backend or (made_on.backend if made_on else None)
    dtype = dtype or (made_on.dtype if made_on else artifact.manifest.dtypes[0])
    sets = artifact.programs()
    found = [one for one in sets if one.build.dtype == dtype and backend in (None, one.build.backend)]
    if not found:
        names = ", ".join(one.build.folder_name for one in sets)
        raise ValueError(f"backend={backend or 'any'} dtype={dtype}: the artifact has {names}")
    return min(found, key=lambda one: AUTO_ORDER.index(one.build.backend))
