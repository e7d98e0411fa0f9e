"""Many callers, one engine: each gets its own text, and whoever goes takes nobody along."""

import asyncio
import gc
import itertools
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from infer.async_llm import AsyncLLM, EngineDeadError
from infer.output import RequestOutput
from infer.params import SamplingParams
from tests.infer.test_engine import make_llm
from tests.tiny_engine import IN_PLACE, PROMPTS, model_of, oracle

NUM_TOKENS = 10
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS)
LONG = SamplingParams(temperature=0, max_tokens=100)


def run(body: Callable[[AsyncLLM], Coroutine[Any, Any, None]], **options: Any) -> None:
    """Run `body` over a fresh engine, which must be idle and whole again afterwards."""

    async def main() -> None:
        llm = make_llm(**{"max_model_len": 128, **options})
        async with AsyncLLM(llm) as engine:
            async with asyncio.timeout(60):
                await body(engine)
        assert not llm.engine.has_unfinished
        assert llm.engine.pool.num_free == llm.engine.pool.num_blocks - 1
        assert engine.num_unfinished == 0

    asyncio.run(main())


async def collect(engine: AsyncLLM, prompt: Any, params: SamplingParams = GREEDY) -> list[RequestOutput]:
    return [output async for output in engine.generate(list(prompt), params)]


async def until_idle(engine: AsyncLLM) -> None:
    while engine.llm.engine.has_unfinished:
        await asyncio.sleep(0.001)


@pytest.mark.parametrize("strategy", IN_PLACE)
def test_concurrent_callers_get_the_oracles_tokens_in_growing_outputs(strategy):
    async def body(engine: AsyncLLM) -> None:
        prompts = PROMPTS * 3
        results = await asyncio.gather(*(collect(engine, p) for p in prompts))
        for prompt, outputs in zip(prompts, results, strict=True):
            assert list(outputs[-1].outputs[0].token_ids) == oracle("llama", prompt, NUM_TOKENS)
            assert [o.finished for o in outputs] == [False] * (len(outputs) - 1) + [True]
            for before, after in itertools.pairwise(outputs):
                assert after.outputs[0].text.startswith(before.outputs[0].text)
            assert len({o.request_id for o in outputs}) == 1

    run(body, strategy=strategy, num_blocks=20)


def test_choices_come_in_one_output():
    async def body(engine: AsyncLLM) -> None:
        params = SamplingParams(temperature=1, seed=5, max_tokens=6, n=3)
        outputs = await collect(engine, PROMPTS[1], params)
        (want,) = make_llm(max_model_len=128).generate([PROMPTS[1]], params)
        assert outputs[-1].outputs == want.outputs
        assert all(len(o.outputs) == 3 for o in outputs)

    run(body)


def test_a_cancelled_caller_frees_its_blocks_and_the_others_go_on():
    async def body(engine: AsyncLLM) -> None:
        first = asyncio.create_task(collect(engine, PROMPTS[0], LONG))
        other = asyncio.create_task(collect(engine, PROMPTS[1]))
        while not engine.llm.engine.running:
            await asyncio.sleep(0.001)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        assert list((await other)[-1].outputs[0].token_ids) == oracle("llama", PROMPTS[1], NUM_TOKENS)
        await until_idle(engine)

    run(body)


@pytest.mark.parametrize("how", ["aclose", "garbage"])
def test_a_closed_iterator_aborts_its_request(how):
    async def body(engine: AsyncLLM) -> None:
        stream = engine.generate(list(PROMPTS[0]), LONG)
        output = await anext(stream)
        assert not output.finished
        if how == "aclose":
            await stream.aclose()
        else:
            del stream
            gc.collect()
        await until_idle(engine)
        assert (await collect(engine, PROMPTS[1]))[-1].finished

    run(body)


def test_cancelling_while_queued_leaves_no_trace():
    async def body(engine: AsyncLLM) -> None:
        tasks = [asyncio.create_task(collect(engine, p, LONG)) for p in PROMPTS * 4]
        await asyncio.sleep(0.005)
        for task in tasks:
            task.cancel()
        assert all(isinstance(r, asyncio.CancelledError) for r in await asyncio.gather(*tasks, return_exceptions=True))
        await until_idle(engine)

    run(body)


def test_abort_by_id_gives_the_caller_what_there_is():
    async def body(engine: AsyncLLM) -> None:
        outputs = []
        async for output in engine.generate(list(PROMPTS[0]), LONG, "mine"):
            outputs.append(output)
            await engine.abort("mine")
            await engine.abort("nobody")
        last = outputs[-1].outputs[0]
        assert last.finish_reason in ("abort", "length")
        assert list(last.token_ids) == oracle("llama", PROMPTS[0], 100)[: len(last.token_ids)]

    run(body)


def test_a_refused_prompt_raises_at_its_caller_alone():
    async def body(engine: AsyncLLM) -> None:
        good = asyncio.create_task(collect(engine, PROMPTS[1]))
        for bad, reason in [([], "empty"), ([-1], "no token id"), ([3] * 200, "max_model_len"), ([3] * 100, "blocks")]:
            with pytest.raises(ValueError, match=reason):
                await collect(engine, bad, LONG)
        assert (await good)[-1].finished

    run(body, num_blocks=24)


def test_an_id_that_is_running_is_refused_and_may_be_used_again_afterwards():
    async def body(engine: AsyncLLM) -> None:
        stream = engine.generate(list(PROMPTS[0]), LONG, "mine")
        await anext(stream)
        with pytest.raises(ValueError, match="'mine' is running already"):
            await anext(engine.generate(list(PROMPTS[1]), GREEDY, "mine"))
        await stream.aclose()
        outputs = [o async for o in engine.generate(list(PROMPTS[1]), GREEDY, "mine")]
        assert list(outputs[-1].outputs[0].token_ids) == oracle("llama", PROMPTS[1], NUM_TOKENS)

    run(body)


def test_a_program_that_raises_ends_the_request_with_its_cause_and_the_engine_serves_on():
    async def body(engine: AsyncLLM) -> None:
        runner = engine.llm.engine.runner
        trunk = runner._trunks[2]

        def broken(*args):  # type: ignore[no-untyped-def]
            runner._trunks[2] = trunk
            raise RuntimeError("out of luck")

        runner._trunks[2] = (broken, *trunk[1:])
        (output,) = await collect(engine, PROMPTS[0])
        assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == (
            "error",
            "RuntimeError: out of luck",
        )
        assert (await collect(engine, PROMPTS[1]))[-1].outputs[0].finish_reason == "length"

    run(body)


def test_a_fault_of_the_engine_reaches_every_caller_present_and_future(monkeypatch):
    async def main() -> None:
        engine = AsyncLLM(make_llm(max_model_len=128))
        step, calls = engine.llm.engine.step, 0

        def failing_step():  # type: ignore[no-untyped-def]
            nonlocal calls
            calls += 1
            assert calls < 3, "a bug"
            return step()

        monkeypatch.setattr(engine.llm.engine, "step", failing_step)
        async with asyncio.timeout(60):
            results = await asyncio.gather(*(collect(engine, p, LONG) for p in PROMPTS[:3]), return_exceptions=True)
            assert all(isinstance(r, EngineDeadError) and "a bug" in str(r) for r in results)
            assert all(isinstance(r.__cause__, AssertionError) for r in results)
            with pytest.raises(EngineDeadError, match="a bug"):
                await collect(engine, PROMPTS[0])
        with pytest.raises(EngineDeadError):
            engine.check_health()
        engine.shutdown()

    asyncio.run(main())


def test_shutdown_ends_waiting_callers_and_may_be_called_twice():
    async def main() -> None:
        llm = make_llm(max_model_len=128)
        engine = AsyncLLM(llm)
        stream = engine.generate(list(PROMPTS[0]), LONG)
        await anext(stream)
        await asyncio.to_thread(engine.shutdown)
        with pytest.raises(EngineDeadError, match="shut down"):
            while True:
                await anext(stream)
        engine.shutdown()
        with pytest.raises(EngineDeadError):
            await collect(engine, PROMPTS[0])
        assert llm.engine.pool.num_free == llm.engine.pool.num_blocks - 1
        assert not engine._thread.is_alive()

    asyncio.run(main())


def test_callers_may_live_on_several_event_loops():
    engine = AsyncLLM(make_llm(max_model_len=128))
    oracle("llama", PROMPTS[0], NUM_TOKENS), model_of()
    got: list[list[int]] = []

    def caller() -> None:
        outputs = asyncio.run(collect(engine, PROMPTS[0]))
        got.append(list(outputs[-1].outputs[0].token_ids))

    threads = [threading.Thread(target=caller) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    engine.shutdown()
    assert got == [oracle("llama", PROMPTS[0], NUM_TOKENS)] * 4


def test_a_step_that_hangs_is_left_behind_and_all_are_told():
    release = threading.Event()

    def hang():
        release.wait(60)
        return []

    async def main() -> None:
        engine = AsyncLLM(make_llm(max_model_len=128))
        engine.llm.engine.step = hang
        caller = asyncio.create_task(collect(engine, PROMPTS[0]))
        while not engine.seconds_in_step:
            await asyncio.sleep(0.001)
        assert not await asyncio.to_thread(engine.shutdown, 0.05)
        with pytest.raises(EngineDeadError, match="left behind"):
            await caller
        with pytest.raises(EngineDeadError, match="left behind"):
            await collect(engine, PROMPTS[0])
        release.set()
        assert await asyncio.to_thread(engine.shutdown), "it was only slow"
        assert not engine.llm.engine.has_unfinished

    try:
        asyncio.run(asyncio.wait_for(main(), 60))
    finally:
        release.set()


def test_a_tokenizer_that_hangs_is_left_behind_and_those_who_wait_are_told():
    release = threading.Event()

    async def main() -> None:
        engine = AsyncLLM(make_llm(max_model_len=128))
        first = asyncio.create_task(engine.with_tokenizer(release.wait, 60))
        second = asyncio.create_task(engine.with_tokenizer(int))
        await asyncio.sleep(0.05)
        assert not await asyncio.to_thread(engine.shutdown, 0.05)
        with pytest.raises(EngineDeadError):
            await second
        assert not await asyncio.to_thread(engine.shutdown, 0.05)
        release.set()
        assert await first

    try:
        asyncio.run(asyncio.wait_for(main(), 60))
    finally:
        release.set()
