"""`python -m infer serve`: OpenAI's API over HTTP."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infer.commands import options

if TYPE_CHECKING:
    from infer.server.settings import Settings

PACKAGES = ("fastapi", "uvicorn", "sse_starlette", "prometheus_client")  # of the extra `serve`
API_KEY_VARIABLE = "HISPEC_API_KEY"  # arguments can be read by everybody on the machine


def add(commands: Any) -> None:
    parser = commands.add_parser("serve", help="OpenAI's API over HTTP, with streams, metrics and a page to chat")
    options.add_engine_options(parser)
    options.add_strategy_options(parser)
    parser.add_argument("--host", default="127.0.0.1", help="0.0.0.0 serves other machines too (default 127.0.0.1)")
    parser.add_argument("--port", type=int, default=8000, help="default 8000; 0 takes a free one")
    add_settings_options(parser)
    parser.add_argument("--ssl-certfile", help="serve over TLS with this certificate")
    parser.add_argument("--ssl-keyfile", help="its key; the password, if it has one, in HISPEC_SSL_PASSWORD")
    parser.add_argument("--ssl-ca-certs", help="let only clients in whose certificate one of these has signed")
    parser.set_defaults(run=_run)


def add_settings_options(parser: argparse.ArgumentParser) -> None:
    """Those of `settings_of`."""
    parser.add_argument("--served-model-name", help="what clients ask for; default: the artifact's folder name")
    parser.add_argument(
        "--api-key",
        action="append",
        default=[],
        help=f"clients must send one of these; may be given several times; also from {API_KEY_VARIABLE}",
    )
    parser.add_argument(
        "--allowed-hosts",
        nargs="+",
        help="names that the Host header may have; * is any (default: this machine's own names where --host is one of "
        "them and there is no key, which keeps pages of other sites out; otherwise any)",
    )
    parser.add_argument("--max-queue", type=int, default=256, help="most texts that wait; more get 429 (default 256)")
    parser.add_argument(
        "--request-timeout", type=float, default=600.0, help="most seconds per request; 0: no limit (default 600)"
    )
    parser.add_argument(
        "--drain-timeout", type=float, default=30.0, help="seconds that running requests have on SIGTERM (default 30)"
    )
    parser.add_argument(
        "--stuck-timeout", type=float, default=60.0, help="seconds after which one step is a fault (default 60)"
    )
    parser.add_argument("--max-body-mib", type=float, default=4.0, help="largest body of a request (default 4)")
    parser.add_argument("--log-prompts", action="store_true", help="write prompts into the log")


def _run(args: argparse.Namespace) -> int:
    from infer.server.settings import names_of_loopback

    settings = settings_of(args, names_of_loopback(args.host))
    if args.ssl_certfile is None and (args.ssl_keyfile or args.ssl_ca_certs):
        raise ValueError("--ssl-keyfile and --ssl-ca-certs need --ssl-certfile")
    options.need_packages("serve", "serve", PACKAGES)
    from infer.server.run import Address, serve

    address = Address(
        host=args.host,
        port=args.port,
        ssl_certfile=args.ssl_certfile,
        ssl_keyfile=args.ssl_keyfile,
        ssl_keyfile_password=os.environ.get("HISPEC_SSL_PASSWORD"),
        ssl_ca_certs=args.ssl_ca_certs,
    )
    with _ending_on_sigterm():
        llm = options.load_llm(args, args.strategy, args.verification)
    serve(llm, settings, address)
    return 0


@contextlib.contextmanager
def _ending_on_sigterm() -> Iterator[None]:
    """While the model loads. The system lets a container's first process ignore signals that it has no handler for;
    uvicorn's come later."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def settings_of(args: argparse.Namespace, own_names: Sequence[str] = ()) -> Settings:
    """
    Args:
        own_names: what the Host header may say where there is neither a key nor --allowed-hosts; empty: anything.
    """
    from infer.server.settings import MIB, Settings

    keys = [*args.api_key, *([os.environ[API_KEY_VARIABLE]] if API_KEY_VARIABLE in os.environ else [])]
    hosts = args.allowed_hosts or (() if keys else own_names)
    return Settings(
        model=Path(args.artifact).resolve().name if args.served_model_name is None else args.served_model_name,
        api_keys=tuple(keys),
        allowed_hosts=() if "*" in hosts else tuple(hosts),
        max_queue=args.max_queue,
        request_timeout=args.request_timeout or None,
        drain_timeout=args.drain_timeout,
        stuck_timeout=args.stuck_timeout,
        max_body_bytes=int(args.max_body_mib * MIB),
        log_prompts=args.log_prompts,
    )
