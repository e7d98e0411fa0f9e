"""`infer inspect`: what an artifact holds, as tables. It reads records and runs nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from infer.artifact import PLAN, Artifact, ProgramSet
from infer.manifest import EXPORT_AGAIN
from infer.plan import Plan
from infer.records import load_json
from infer.report import print_plan

PARITY = "parity.json"


def print_artifact(artifact: Artifact, console: Console | None = None) -> None:
    """Base, tiers and exits, programs, what export's gates found, files, plan."""
    console = console or Console(width=120, markup=False)  # what records say is text: pip install 'hispec[onnx]'
    _print_base(artifact, console)
    sets = artifact.programs()
    console.print(_tiers(artifact))
    console.print(_sets(sets))
    for one in sets:
        console.print(_programs(artifact, one))
    parity = read_parity(artifact)
    for table in (_parity(parity), _served(parity), _acceptance(parity)):
        if table.row_count:
            console.print(table)
        else:
            console.print(f"no figures: {table.title}")
    console.print(_files(artifact))
    _print_plan(artifact, console)


def _print_base(artifact: Artifact, console: Console) -> None:
    manifest, base = artifact.manifest, artifact.manifest.base
    revision = "" if base.revision is None else f" at {base.revision}"
    console.print(f"{base.name}{revision}: {base.family}, {base.num_layers} layers, {base.vocab_size} ids")
    limits = manifest.limits
    console.print(
        f"at most {limits.max_model_len} tokens and {limits.max_batch} sequences; blocks of {manifest.block_size}, "
        f"prompts in chunks of {limits.prefill_chunk}; ends at ids {manifest.eos_token_ids}"
    )
    provenance = manifest.provenance
    if (reference := provenance.get("reference")) is not None:
        console.print(_reference(reference))
    versions = ", ".join(f"{name} {version}" for name, version in (provenance.get("versions") or {}).items())
    console.print(f"made by {' '.join(provenance.get('argv') or ['?'])} (git {provenance.get('git')}; {versions})")


def _reference(reference: Mapping[str, Any]) -> str:
    drift = reference.get("drift")
    far = "drift not measured"
    if drift is not None:
        far = f"KL {drift['kl']:.4f} nats from it, same token {drift['agreement']:.1%}, on {drift['num_labels']} labels"
    made_of, mode = reference["trained_from"]["name"], reference["mode"]
    return f"the target is a new model, made of {made_of!r} by training with model.backbone={mode}: {far}"


def _tiers(artifact: Artifact) -> Table:
    manifest = artifact.manifest
    exits = {e.name: e for e in manifest.exits}
    table = _table("tiers", "tier", "layers", "exit", "head", "ids it can pick", "reads the target's state")
    for tier in manifest.tiers:
        one = exits[tier.exit]
        reach = f"of up to {one.context} tokens before" if one.context else "–"
        size = str(one.vocab_size or manifest.base.vocab_size)
        table.add_row(tier.name, f"{tier.start}–{tier.stop}", one.name, one.head, size, reach)
    return table


def _sets(sets: list[ProgramSet]) -> Table:
    table = _table("sets of programs", "programs", "backend", "dtype", "processor", "threads", "runs here")
    for one in sets:
        build = one.build
        here = "; ".join(build.misfits()) or "yes"
        table.add_row(
            build.folder_name, build.backend, build.dtype, f"{build.processor or build.machine} {build.cpu_capability}",
            str(build.num_threads), here,
        )  # fmt: skip
    return table


def _programs(artifact: Artifact, programs: ProgramSet) -> Table:
    """Sizes are those of the program's file, and of its weights where they have a file: other backends' programs hold
    them, or share one."""
    build, files = programs.build, artifact.manifest.files
    table = _table(build.folder_name, "program", "KV layers", "same bits for tokens", "MB", "weights, MB", "products")
    for name, info in build.programs.items():
        size = files[f"programs/{build.folder_name}/{info.file}"].size
        weights = files.get(f"weights/{build.dtype}/{name}.safetensors") if build.backend == "eager" else None
        layers = "–".join(str(layer) for layer in dict.fromkeys([*info.kv_layers[:1], *info.kv_layers[-1:]])) or "–"
        bits = "not found" if info.bitwise_range is None else "{}–{}".format(*info.bitwise_range)
        kernels = ", ".join(f"{count} {kind}" for kind, count in info.num_kernels.items() if count) or "–"
        table.add_row(
            name, layers, bits, _megabytes(size), "–" if weights is None else _megabytes(weights.size), kernels
        )
    return table


def _parity(parity: Mapping[str, Any]) -> Table:
    table = _table(
        "logits against the model's",
        "programs",
        "tier",
        "error",
        "allowed",
        "same largest logit",
        "at least",
        "positions",
    )
    for name, tiers in (parity.get("programs") or {}).items():
        for one in tiers:
            least = one.get("least_agreement")  # older exports held nobody to it
            table.add_row(
                name,
                one["tier"],
                f"{one['max_error']:.1e}",
                f"{one['allowed']:.1e}",
                f"{one['top1_agreement']:.2%}",
                "–" if least is None else f"{least:.1%}",
                str(one["num_positions"]),
            )
    return table


def _served(parity: Mapping[str, Any]) -> Table:
    """Texts through the whole runtime, greedy."""
    table = _table("texts that export's gate served", "programs", "as plain decoding", "as transformers", "tokens each")
    for name, one in (parity.get("served") or {}).items():
        total = one["num_prompts"]
        own = ", ".join(f"{strategy} {count} of {total}" for strategy, count in one["num_equal"].items())
        equal, ties = one["num_equal_to_transformers"], one["num_ties"]
        theirs = "not compared" if equal is None else f"{equal} of {total}" + (f", {ties} ties" if ties else "")
        table.add_row(name, own, theirs, str(one["num_tokens"]))
    return table


def _acceptance(parity: Mapping[str, Any]) -> Table:
    """Exits as programs, on validation's text, and the draft exit in the engine, on its own."""
    table = _table(
        "acceptance by the target, against what validation promised",
        "programs",
        "exit",
        "text",
        "agreement",
        "promised",
        "accepted by place, %",
        "promised, %",
    )
    for name, exits in (parity.get("acceptance") or {}).items():
        for one in exits:
            cells = []
            for key in ("agreement", "rates"):
                for side in ("found", "expected"):
                    value = one[side][key]
                    listed = value if isinstance(value, list) else [] if value is None else [value]
                    cells.append(", ".join(f"{100 * number:.1f}" for number in listed) or "–")
            text = "validation's" if one["by"] == "programs" else "the engine's"
            table.add_row(name, one["exit"], text, *cells)
    return table


def _files(artifact: Artifact) -> Table:
    """Sizes by folder; every one of these files was as recorded."""
    sizes: dict[str, list[int]] = {}
    for name, record in artifact.manifest.files.items():
        sizes.setdefault(name.rpartition("/")[0] or ".", []).append(record.size)
    table = _table("files, all as recorded", "folder", "files", "MB")
    for folder, found in sorted(sizes.items()):
        table.add_row(folder, str(len(found)), _megabytes(sum(found)))
    everything = [size for found in sizes.values() for size in found]
    table.add_row("together", str(len(everything)), _megabytes(sum(everything)))
    return table


def _print_plan(artifact: Artifact, console: Console) -> None:
    path = artifact.path / PLAN
    if not path.exists():
        console.print("no plan: python -m infer plan makes one; until then strategy auto decodes plainly")
        return
    try:
        plan = Plan.from_json(path.read_text(encoding="utf-8"), artifact.manifest)
    except (ValueError, OSError) as error:  # the artifact is whole without it, and runs without it
        console.print(f"{PLAN} can't be used: {error}")
        return
    print_plan(plan, console)


def read_parity(artifact: Artifact) -> Mapping[str, Any]:
    path = artifact.path / PARITY
    if not path.exists():
        return {}
    found = load_json(path.read_text(encoding="utf-8"), PARITY, EXPORT_AGAIN)
    if not isinstance(found, dict):
        raise ValueError(f"{PARITY}: got {found!r}, expected an object; {EXPORT_AGAIN}")
    return found


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.2f}"
