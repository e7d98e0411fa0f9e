"""One HTTP request's texts, from its prompts to the engine's outputs. Knows neither JSON nor streams."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace

import anyio

from infer.async_llm import AsyncLLM, EngineDeadError
from infer.llm import LLM
from infer.output import RequestOutput
from infer.params import SamplingParams
from infer.request import Request
from infer.server.answers import check_finish
from infer.server.errors import engine_is_dead
from infer.server.gate import Ticket
from infer.server.metrics import Metrics
from infer.server.protocol import ChatRequest, CompletionRequest
from infer.server.shapes import Echo


class Job:
    """
    Args:
        ticket: of the whole request; closed by `close`.
    """

    def __init__(self, engine: AsyncLLM, ticket: Ticket, metrics: Metrics) -> None:
        self.id = uuid.uuid4().hex
        self.ticket = ticket
        self.echoes: list[Echo] = []
        self.last: dict[int, RequestOutput] = {}  # the newest output of each prompt
        self.error_code: str | None = None  # of what went wrong after its answer had begun
        self._engine, self._metrics = engine, metrics
        self._requests: list[Request] = []
        self._is_echo_alone = False
        self._is_closed = False

    async def prepare(self, asked: ChatRequest | CompletionRequest, params: SamplingParams) -> None:
        """Tokenize, off the event loop; nothing runs yet.

        Raises:
            ValueError: what the model or its template can't do.
            ApiError: the ticket ended first.
        """
        self._is_echo_alone = isinstance(asked, CompletionRequest) and asked.is_echo_alone
        for number in range(asked.num_prompts):
            request, echo = await self.ticket.wait(
                self._engine.with_tokenizer(_prepare, self._engine.llm, asked, params, number, f"{self.id}-{number}")
            )
            self._requests.append(request)
            self.echoes.append(echo)

    async def outputs(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """Number of a prompt and all of its texts so far, whenever there is more of one.

        Raises:
            ApiError: the ticket ended, the engine died, or a text was cut short.
        """
        has_token = False
        async with aclosing(merged([self._engine.run(request) for request in self._requests])) as streams:
            while True:
                try:
                    item = await self.ticket.wait(anext(streams, None))
                except EngineDeadError as error:
                    raise engine_is_dead(error) from error
                if item is None:
                    return
                number, output = item
                for text in output.outputs:
                    check_finish(text)
                if not has_token:
                    has_token = True
                    self._metrics.note_first_token(self.ticket.age)
                if output.finished:
                    self._metrics.note_finished(output)
                self.last[number] = _without_texts(output) if self._is_echo_alone else output
                yield number, self.last[number]

    async def finish(self) -> list[RequestOutput]:
        """The complete outputs, in the prompts' order."""
        async with aclosing(self.outputs()) as outputs:
            async for _ in outputs:
                pass
        return [self.last[number] for number in range(len(self._requests))]

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._metrics.note_request(self.ticket.age)
            self.ticket.close()


def _without_texts(output: RequestOutput) -> RequestOutput:
    """Its prompt alone."""
    texts = [
        replace(
            text,
            text="",
            token_ids=(),
            finish_reason=text.finish_reason and "length",
            stop_reason=None,
            logprobs=None if text.logprobs is None else [],
            proposers=b"",
        )
        for text in output.outputs
    ]
    return replace(output, outputs=tuple(texts))


async def merged(
    streams: Sequence[AsyncGenerator[RequestOutput, None]],
) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """Outputs of all streams as they come, with their stream's number. Closing it closes them."""
    waiting = {asyncio.ensure_future(anext(stream, None)): number for number, stream in enumerate(streams)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for future in sorted(done, key=waiting.__getitem__):
                number = waiting.pop(future)
                output = future.result()
                if output is not None:
                    waiting[asyncio.ensure_future(anext(streams[number], None))] = number
                    yield number, output
    finally:
        with anyio.CancelScope(shield=True):  # a response that is cancelled would cancel this again and again
            for future in waiting:
                future.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
            for stream in streams:
                await stream.aclose()


def _prepare(
    llm: LLM, asked: ChatRequest | CompletionRequest, params: SamplingParams, number: int, name: str
) -> tuple[Request, Echo]:
    """On the tokenizer's thread."""
    if isinstance(asked, ChatRequest):
        ids = llm.chat_prompt(asked.conversation(), asked.shown_tools())
        return llm.make_request(ids, params, name), Echo()
    prompt = asked.prompt[number]
    request = llm.make_request(prompt, params, name, number=number)
    if not asked.echo:
        return request, Echo()
    ids = list(request.prompt_token_ids)
    decode = llm.tokenizer.decode
    text = prompt if isinstance(prompt, str) else decode(ids, skip_special_tokens=params.skip_special_tokens)
    return request, Echo(text, decode(ids[:1], skip_special_tokens=False))
