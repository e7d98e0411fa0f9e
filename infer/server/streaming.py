"""Answers as server-sent events: chunks of OpenAI's shape, then `[DONE]`."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

from sse_starlette import EventSourceResponse
from starlette.types import Receive, Scope, Send

from infer.output import CompletionOutput
from infer.server.answers import dumps, usage
from infer.server.errors import ApiError
from infer.server.job import Job
from infer.server.protocol import TextRequest
from infer.server.shapes import Sent, Shape
from infer.server.tiers import TierReport

logger = logging.getLogger(__name__)


class EventStream(EventSourceResponse):
    """Runs `on_end` whatever becomes of the stream, also if its first event was never asked for."""

    def __init__(
        self,
        events: AsyncGenerator[str, None],
        on_end: Callable[[], None],
        *,
        send_timeout: float,
        drain_timeout: float,
    ) -> None:
        # The library would end streams as soon as the server stops; who may finish is the gate's to say
        super().__init__(events, sep="\n", send_timeout=send_timeout, shutdown_grace_period=drain_timeout)
        self._events, self._on_end = events, on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        except TimeoutError:  # a client that does not read: there is nobody to tell
            logger.warning("a stream's client read nothing for %g s and was dropped", self.send_timeout)
        finally:
            try:
                await self._events.aclose()
            finally:
                self._on_end()


async def events(
    job: Job,
    shape: Shape,
    asked: TextRequest,
    envelope: dict[str, Any],
    num_choices: int,
    tiers: TierReport,
) -> AsyncGenerator[str, None]:
    """The data of each event. What goes wrong now can only be said in the stream, so it is, as the last but one.

    Args:
        envelope: the fields that all chunks share.
        num_choices: n, texts for each prompt.
        tiers: says where tokens came from, to those who ask.
    """
    envelope = envelope | ({"usage": None} if asked.include_usage else {})
    sent: dict[int, Sent] = {}
    try:
        for index in range(len(job.echoes) * num_choices):
            sent[index] = Sent(offset=0)
            if (opening := shape.opening(index)) is not None:
                yield dumps(envelope | {"choices": [opening]})
        async with aclosing(job.outputs()) as outputs:
            async for number, output in outputs:
                for text in output.outputs:
                    index = number * num_choices + text.index
                    if index in sent and _has_news(text, sent[index]):
                        start = sent[index].num_tokens
                        choice = shape.part(index, text, output, job.echoes[number], sent[index])
                        if asked.hispec_tiers:
                            choice["hispec"] = tiers.of(text, start, output.metrics)
                        if text.finish_reason is not None:
                            del sent[index]
                        yield dumps(envelope | {"choices": [choice]})
        if asked.include_usage:
            yield dumps(envelope | {"choices": [], "usage": usage(job.last.values())})
    except ApiError as error:
        job.error_code = error.code
        yield dumps(error.body)
    except Exception:
        logger.exception("a stream broke off")
        job.error_code = "internal_error"
        yield dumps(ApiError(500, "internal error: the server's log says more", code="internal_error").body)
    yield "[DONE]"


def _has_news(text: CompletionOutput, sent: Sent) -> bool:
    if text.finish_reason is not None or len(text.text) > sent.num_characters:
        return True
    return text.logprobs is not None and len(text.token_ids) > sent.num_tokens
