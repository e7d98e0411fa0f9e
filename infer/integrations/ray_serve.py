"""OpenAI's API on Ray Serve: replicas of the server that `python -m infer serve` runs, behind Serve's proxy.

    serve run infer.integrations.ray_serve:app artifact=DIR num_replicas=2
    python -m infer.integrations.ray_serve --artifact DIR --num-replicas 2 --port 8000

Both take the same options, with _ and = for the first. Serve chooses the replica, counts requests, adds replicas and
replaces those whose engine is dead or stuck; a replica is the same app over the same engine, and answers alike.
"""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infer.commands import options
from infer.commands.serve import add_settings_options, settings_of
from infer.integrations.cluster import SERVE, check_room, connected

if TYPE_CHECKING:
    from fastapi import FastAPI
    from ray.serve import Application

    from infer.server.settings import Settings

_ENGINE_SECONDS = 10.0  # for the engine's last step
_NAME = "hispec"


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicas:
    """How many servers Serve runs, and what each of them gets.

    Raises:
        ValueError: no replica, or fewer at most than at least.
    """

    num: int = 1
    max_num: int | None = None  # between num and this many, by load; None: always num
    target_ongoing_requests: float | None = None  # that load, of each; None: as many as the engine runs at once
    num_cpus: float = 1
    num_gpus: float = 0

    def __post_init__(self) -> None:
        if self.num < 1:
            raise ValueError(f"num_replicas={self.num} must be at least 1")
        if self.max_num is not None and self.max_num < self.num:
            raise ValueError(f"max_replicas={self.max_num} must be at least num_replicas={self.num}")
        if self.max_num is None and self.target_ongoing_requests is not None:
            raise ValueError("target_ongoing_requests says when to add replicas: give max_replicas too")


class Server:
    """One replica: an engine of its own, and the app over it."""

    def __init__(self, artifact: str, engine: Mapping[str, Any], settings: Settings) -> None:
        from infer.async_llm import AsyncLLM
        from infer.llm import LLM
        from infer.server.app import make_app

        self._engine = AsyncLLM(LLM(artifact, **engine))
        self._made = make_app(self._engine, settings)

    def __serve_build_asgi_app__(self) -> FastAPI:
        return self._made

    async def check_health(self) -> None:
        """Asked by Serve every few seconds; a replica that raises is replaced."""
        self._made.state.gate.check_engine()

    def __del__(self) -> None:
        if hasattr(self, "_engine"):
            self._engine.shutdown(_ENGINE_SECONDS)


def build_app(
    artifact: str, settings: Settings, *, engine: Mapping[str, Any] | None = None, replicas: Replicas | None = None
) -> Application:
    """A Serve application, for `serve.run`.

    Args:
        artifact: as `LLM` takes it; all machines must find it.
        engine: `LLM`'s keyword arguments.

    Raises:
        ValueError: a package is missing, or the artifact is not whole.
    """
    options.need_packages("Ray Serve", "ray", SERVE)
    from ray import serve

    from infer.artifact import Artifact

    wanted, one = dict(engine or {}), replicas or Replicas()
    opened = Artifact.open(artifact)
    # Replicas have working directories of their own; an id on the hub each machine fetches for itself
    source = str(opened.path.resolve()) if Path(artifact).is_dir() else artifact
    at_once = wanted.get("max_num_seqs", 16)
    scaling: dict[str, Any] = {"num_replicas": one.num}
    if one.max_num is not None:
        target = one.target_ongoing_requests or at_once
        bounds = {"min_replicas": one.num, "max_replicas": one.max_num, "target_ongoing_requests": target}
        scaling = {"autoscaling_config": bounds}
    deployment = serve.deployment(
        serve.ingress()(Server),
        name=_NAME,
        max_ongoing_requests=at_once + settings.max_queue,  # beyond that the app itself would answer 429
        graceful_shutdown_timeout_s=settings.drain_timeout,
        ray_actor_options={"num_cpus": one.num_cpus, "num_gpus": one.num_gpus},
        **scaling,
    )
    return deployment.bind(source, wanted, settings)


def app(args: dict[str, Any]) -> Application:
    """The builder that `serve run` and Serve's config files call, with this module's options as `args`."""
    parsed = parse(args)
    return _build(parsed, settings_of(parsed))


def parse(args: Mapping[str, Any]) -> argparse.Namespace:
    """The options of `python -m infer.integrations.ray_serve` out of a mapping: true is a flag that is given, false one
    that is not, a list an option with several values, and null one that is left out.

    Raises:
        ValueError: an option is unknown, or its value is none.
    """
    argv = []
    parser = _app_parser(_Raising)
    takes_many = {option for action in parser._actions if action.nargs for option in action.option_strings}
    for name, value in args.items():
        flag = f"--{name.replace('_', '-')}"
        if isinstance(value, (list, tuple)):
            texts = [str(one) for one in value]
            argv += [flag, *texts] if flag in takes_many else [f"{flag}={text}" for text in texts]
        elif str(value).lower() == "true":
            argv.append(flag)
        elif str(value).lower() == "false":
            argv += [f"--no-{flag[2:]}"] if name == "bitwise" else []
        elif value is not None:
            argv.append(f"{flag}={value}")
    return parser.parse_args(argv)


class _Raising(argparse.ArgumentParser):
    """For callers that are no command lines: argparse would end their process."""

    def error(self, message: str) -> Any:
        raise ValueError(f"{message}; python -m infer.integrations.ray_serve --help lists all options")


def _app_parser(kind: type[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Options of the application, wherever it runs."""
    parser = kind(
        prog="python -m infer.integrations.ray_serve", description="OpenAI's API over HTTP, with replicas on Ray Serve."
    )
    parser.add_argument("--artifact", required=True, help="folder that `python -m export` wrote; all machines need it")
    parser.add_argument("--num-replicas", type=int, default=1, help="servers with an engine each (default 1)")
    parser.add_argument("--max-replicas", type=int, help="up to so many, by load; --num-replicas are the fewest then")
    parser.add_argument(
        "--target-ongoing-requests", type=float, help="requests at each replica, above which there will be more of them"
    )
    parser.add_argument(
        "--cpus-per-replica",
        type=float,
        default=1,
        help="as many as the artifact was exported with threads (default 1)",
    )
    parser.add_argument("--gpus-per-replica", type=float, help="default: 1 with --device cuda, else 0")
    options.add_strategy_options(parser)
    options.add_llm_options(parser)
    add_settings_options(parser)
    return parser


def _build(args: argparse.Namespace, settings: Settings) -> Application:
    engine = options.llm_options(args, args.strategy, args.verification)
    return build_app(args.artifact, settings, engine=engine, replicas=_replicas(args))


def _replicas(args: argparse.Namespace) -> Replicas:
    return Replicas(
        num=args.num_replicas,
        max_num=args.max_replicas,
        target_ongoing_requests=args.target_ongoing_requests,
        num_cpus=args.cpus_per_replica,
        num_gpus=args.gpus_per_replica if args.gpus_per_replica is not None else int(args.device == "cuda"),
    )


# ---- the command ----


def _parser() -> argparse.ArgumentParser:
    parser = _app_parser(argparse.ArgumentParser)
    parser.add_argument("--host", default="127.0.0.1", help="0.0.0.0 serves other machines too (default 127.0.0.1)")
    parser.add_argument("--port", type=int, default=8000, help="of Serve's proxy (default 8000)")
    parser.add_argument("--address", help="of a Ray cluster; default: RAY_ADDRESS, or else this machine alone")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    try:
        return _run(args)
    except (ValueError, FileNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _run(args: argparse.Namespace) -> int:
    """Until SIGTERM or Ctrl-C; running requests have --drain-timeout seconds then."""
    from infer.server.settings import names_of_loopback

    application = _build(args, settings_of(args, names_of_loopback(args.host)))
    replicas = _replicas(args)
    from ray import serve

    with connected(args.address) as is_started:
        if is_started:
            check_room("replicas", replicas.num, replicas.num_cpus, replicas.num_gpus)
        for number in (signal.SIGTERM, signal.SIGINT):  # in place of Ray's own, which abort; replicas serve before
            signal.signal(number, signal.default_int_handler)  # `serve.run` returns, so it may come at any time
        serve.start(http_options={"host": args.host, "port": args.port})
        try:
            serve.run(application, name=_NAME, route_prefix="/")
            threading.Event().wait()
        except KeyboardInterrupt:
            pass  # the end that was asked for
        except RuntimeError as error:  # no replica could start; their logs have been shown
            raise ValueError(f"the application could not be started: {error}") from error
        finally:
            if is_started:
                serve.shutdown()
            else:  # others may have applications of their own there
                serve.delete(_NAME)
    return 0


if __name__ == "__main__":
    sys.exit(main())
