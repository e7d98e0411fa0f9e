"""Runs the app under uvicorn, with a graceful end.

    SIGTERM    /ready and new requests: 503; the port stays open for some seconds, also when nothing runs, since load
               balancers such as Kubernetes' go on sending requests here until they know; not so after Ctrl-C
    then       running requests finish; those that are not done after drain_timeout end with an error
    at last    connections are closed, then the engine

A second signal ends all of it at once. An engine that hangs is left behind: the process ends by itself all the same,
with exit code 1.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from dataclasses import dataclass
from types import FrameType

import uvicorn

from infer.async_llm import AsyncLLM
from infer.llm import LLM
from infer.server.app import make_app
from infer.server.gate import Gate
from infer.server.logs import log_config
from infer.server.settings import Settings

logger = logging.getLogger(__name__)

_OPEN_SECONDS = 3.0  # after SIGTERM, at least
_CLOSING_SECONDS = 5  # for connections, once no request is left
_ENGINE_SECONDS = 10.0  # for the engine's last step


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    host: str
    port: int
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    ssl_keyfile_password: str | None = None
    ssl_ca_certs: str | None = None  # clients must then show a certificate that these have signed


class DrainingServer(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, gate: Gate) -> None:
        super().__init__(config)
        self._gate = gate

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._gate.is_draining:
            self.should_exit = self.force_exit = True
        self._gate.drain(_OPEN_SECONDS if sig == signal.SIGTERM else 0.0)

    async def on_tick(self, counter: int) -> bool:
        """Called ten times a second."""
        if self._gate.is_drained():
            self.should_exit = True
        return await super().on_tick(counter)


def serve(llm: LLM, settings: Settings, address: Address) -> None:
    """Until SIGTERM or Ctrl-C. Ends the process, with exit code 1, if the engine hangs then.

    Raises:
        ValueError: the port is taken, or the certificate can't be read.
    """
    engine = AsyncLLM(llm)
    try:
        app = make_app(engine, settings)
        try:
            config = uvicorn.Config(
                app,
                host=address.host,
                port=address.port,
                ssl_certfile=address.ssl_certfile,
                ssl_keyfile=address.ssl_keyfile,
                ssl_keyfile_password=address.ssl_keyfile_password,
                ssl_ca_certs=address.ssl_ca_certs,
                ssl_cert_reqs=2 if address.ssl_ca_certs else 0,  # ssl.CERT_REQUIRED, ssl.CERT_NONE
                loop="asyncio",  # both as tested, whatever else is installed: Ray brings uvloop and httptools
                http="h11",
                ws="none",
                lifespan="on",
                access_log=False,
                server_header=False,
                proxy_headers=False,
                log_config=log_config(),
                timeout_graceful_shutdown=_CLOSING_SECONDS,
            )
            config.load()
        except OSError as error:  # ssl.SSLError is one
            raise ValueError(f"ssl_certfile={address.ssl_certfile!r} can't be used: {error}") from error
        server = DrainingServer(config, app.state.gate)
        try:
            server.run()
        except SystemExit as error:  # uvicorn's way to say that it could not start; its log has the cause
            raise ValueError(f"could not listen on {address.host}:{address.port}: choose another --port") from error
    finally:
        if not engine.shutdown(_ENGINE_SECONDS):
            logger.critical("the process ends without its engine, which hangs")
            logging.shutdown()
            sys.stdout.flush()
            os._exit(1)  # an orderly exit would wait for the tokenizer's thread
