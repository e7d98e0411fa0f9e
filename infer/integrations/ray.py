"""Offline inference with Ray Data: a file of prompts through several engines, each an actor that loads the artifact.

    python -m infer.integrations.ray prompts.jsonl answers.parquet --artifact DIR --actors 2

Rows go out in blocks of `batch_size` and come back in the input's order. Ray gives a block whose actor dies to another;
`--resume` goes on after the job itself has ended. What one actor does is `generator`'s, the file `answer_file`'s.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infer.commands import options
from infer.commands.sampling import add_sampling_options, sampling_params
from infer.integrations.cluster import DATA, check_room, connected

if TYPE_CHECKING:
    from infer.integrations.answer_file import Counts
    from infer.params import SamplingParams


class JobStopped(RuntimeError):
    """Ray has given up. What was complete is kept."""


def generate_dataset(
    artifact: str | os.PathLike[str],
    input: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    sampling_params: SamplingParams | None = None,
    engine: Mapping[str, Any] | None = None,
    actors: int = 1,
    batch_size: int = 64,
    num_cpus: float = 1,
    num_gpus: float | None = None,
    max_restarts: int = 3,
    raw: bool = False,
    resume: bool = False,
    address: str | None = None,
) -> Counts:
    """Answer every row of `input`; `output` has one row for each, in the same order, with the same `id`.

    Args:
        artifact: as `LLM` takes it; all machines must find it.
        input: .jsonl, .parquet or .txt, or a folder of the first two: rows with `prompt`, `turns` or `messages`, maybe
            an `id` (made if missing) and `sampling_params`, which replace this call's field by field.
        output: .jsonl or .parquet with `generator.ANSWERED`'s columns but for `number`; appears when it is complete.
        engine: `LLM`'s keyword arguments.
        actors: how many engines work at once.
        batch_size: rows that an actor takes at once, and that are computed again if it dies. At the end of each its
            batch runs empty, so it should be several times `max_num_seqs`.
        num_cpus: of each actor: as many as the artifact was exported with threads.
        num_gpus: of each actor; None: 1 if the engine's `device` is cuda, else none.
        max_restarts: how often Ray replaces an actor that dies, and how often it gives it the same block.
        raw: complete the text itself, without the chat template.
        resume: go on where an interrupted job of the same input and options stopped.
        address: of a cluster; None: RAY_ADDRESS, or else a Ray of this machine's for as long as the job takes.

    Raises:
        ValueError: before any work: a package is missing, the input can't be read, two rows have one id.
        JobStopped: an actor died too often, or can't load the artifact.
    """
    options.need_packages("a Ray Data job", "ray", DATA)
    from infer.artifact import Artifact
    from infer.integrations.answer_file import AnswerFile, check_suffix, finished_before
    from infer.params import SamplingParams

    for name, value in (("actors", actors), ("batch_size", batch_size)):
        if value < 1:
            raise ValueError(f"{name}={value} must be at least 1")
    params = sampling_params or SamplingParams()
    if params.n != 1:
        raise ValueError(f"n={params.n}: one row gives one text; repeat the row, with a seed of its own, instead")
    path = Path(output)
    check_suffix(path)
    options.check_output(path, "output")
    opened = Artifact.open(artifact)
    rows = _rows(Path(input))
    ids = [row["id"] for row in rows]
    if resume and (counts := finished_before(path, ids)) is not None:
        return counts
    if num_gpus is None:
        num_gpus = 1 if dict(engine or {}).get("device") == "cuda" else 0
    # Actors have working directories of their own; an id on the hub each machine fetches for itself
    source = str(opened.path.resolve()) if Path(artifact).is_dir() else str(artifact)
    arguments = (source, dict(engine or {}), params, raw)
    remote = {
        "num_cpus": num_cpus,
        "num_gpus": num_gpus,
        "max_restarts": max_restarts,
        "max_task_retries": max_restarts,
    }
    with AnswerFile(path, ids, resume=resume) as file:
        with connected(address) as is_started:
            if is_started:
                check_room("actors", actors, num_cpus, num_gpus)
            for answers in _run(rows[file.num_kept :], batch_size, actors, arguments, remote):
                file.write(answers)
        return file.finish()


def _rows(path: Path) -> list[dict[str, Any]]:
    """`generator.ASKED`'s columns of every row.

    Raises:
        ValueError: the file can't be read, or two rows have one id.
    """
    from infer.integrations.generator import KEPT
    from infer.prompts import read_records

    rows, places = list[dict[str, Any]](), dict[str, str]()
    for number, record in enumerate(read_records(path)):
        if record.id in places:
            raise ValueError(
                f"{record.where} and {places[record.id]} have one id, {record.id!r}: give each row one of its own, or "
                "leave it out to have it made"
            )
        if not _is_text(record.id):
            raise ValueError(f"{record.where}: id={record.id!r} holds half a character: give the row another one")
        places[record.id] = record.where
        fields = {name: value for name in KEPT if (value := record.fields.get(name)) is not None}
        text = json.dumps(fields, default=str)
        rows.append({"number": number, "id": record.id, "where": record.where, "fields": text})
    return rows


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _run(
    rows: Sequence[Mapping[str, Any]], batch_size: int, actors: int, arguments: tuple[Any, ...], remote: dict[str, Any]
) -> Iterator[list[dict[str, Any]]]:
    """`generator.ANSWERED`'s columns, but for `number`, of the rows, in their order, some at a time."""
    if not rows:
        return
    import pyarrow as pa
    import ray

    from infer.integrations.generator import ASKED, Generator

    blocks = [pa.Table.from_pylist(rows[at : at + batch_size], ASKED) for at in range(0, len(rows), batch_size)]
    dataset = ray.data.from_arrow(blocks).map_batches(
        Generator,
        fn_constructor_args=arguments,
        batch_size=batch_size,
        batch_format="pyarrow",
        compute=ray.data.ActorPoolStrategy(size=actors),
        **remote,
    )
    dataset.context.execution_options.preserve_order = True
    due = iter(rows)
    try:
        for table in dataset.iter_batches(batch_size=None, batch_format="pyarrow"):
            answers = table.to_pylist()
            for answer in answers:
                expected = next(due)["number"]
                if answer.pop("number") != expected:
                    raise RuntimeError(f"Ray Data gave another row where number {expected} was due")
            yield answers
    except ray.exceptions.RayError as error:
        raise JobStopped(f"Ray has stopped the job: {error}") from error


# ---- the command ----


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    try:
        counts = generate_dataset(
            args.artifact,
            args.input,
            args.output,
            sampling_params=sampling_params(args),
            engine=options.llm_options(args, args.strategy, args.verification),
            actors=args.actors,
            batch_size=args.batch_size,
            num_cpus=args.cpus_per_actor,
            num_gpus=args.gpus_per_actor,
            max_restarts=args.max_restarts,
            raw=args.raw,
            resume=args.resume,
            address=args.address,
        )
    except (ValueError, FileNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except JobStopped as error:
        print(f"error: {error}\nwhat was complete is kept: go on with --resume", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    written, failed = counts
    print(f"{written} written + {failed} failed = {written + failed} asked: {args.output}", file=sys.stderr)
    return 1 if failed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m infer.integrations.ray",
        description="Answer a file of prompts with several engines, on Ray Data.",
    )
    parser.add_argument(
        "input", type=Path, help=".jsonl or .parquet (prompt, turns or messages), a folder of them, .txt"
    )
    parser.add_argument("output", type=Path, help=".jsonl or .parquet; appears when it is complete")
    parser.add_argument("--artifact", required=True, help="folder that `python -m export` wrote; all machines need it")
    parser.add_argument("--actors", type=int, default=1, help="engines that work at once (default 1)")
    parser.add_argument("--batch-size", type=int, default=64, help="rows that an actor takes at once (default 64)")
    parser.add_argument(
        "--cpus-per-actor", type=float, default=1, help="as many as the artifact was exported with threads (default 1)"
    )
    parser.add_argument("--gpus-per-actor", type=float, help="default: 1 with --device cuda, else 0")
    parser.add_argument(
        "--max-restarts", type=int, default=3, help="times that an actor that dies is replaced (default 3)"
    )
    parser.add_argument("--address", help="of a Ray cluster; default: RAY_ADDRESS, or else this machine alone")
    parser.add_argument(
        "--resume", action="store_true", help="go on where an interrupted job of the same input and options stopped"
    )
    parser.add_argument("--raw", action="store_true", help="complete the text itself, without the chat template")
    options.add_strategy_options(parser)
    options.add_llm_options(parser)
    add_sampling_options(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
