"""Clients leave, queues fill, time runs out, engines die, servers stop: each has one outcome, and blocks come back."""

import asyncio
import itertools
import json
import logging
import signal
import socket
import threading
import time

import httpx
import openai
import pytest
import uvicorn

from infer.params import SamplingParams
from infer.server.gate import Gate
from infer.server.run import DrainingServer
from tests.infer.server.harness import CHAT, TEXT, in_process, official, on_port, served, settings, sse, until

CHATS, TEXTS = "/v1/chat/completions", "/v1/completions"
NUM_LONG = 24
LONG = {"prompt": "a", "max_tokens": NUM_LONG, "temperature": 0, "ignore_eos": True}
STEP = 0.1  # seconds that a slow step takes more: a long text then lasts until the test lets it go


def code(response):
    return response.status_code, response.json()["error"]["code"]


def wait_until(condition, seconds=10):
    asyncio.run(until(condition, seconds))


# ---- clients that go (D02) ----


def send_raw(address, path, body):
    """A socket on which the request has been sent, and nothing read."""
    host, port = address.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)))
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    connection.sendall(head.encode() + data)
    return connection


@pytest.mark.parametrize("is_stream", [True, False])
@pytest.mark.parametrize(("path", "body"), [(TEXTS, LONG), (CHATS, CHAT | {"max_tokens": NUM_LONG})])
def test_a_client_that_goes_frees_its_blocks_within_two_steps(llm, path, body, is_stream, reference):
    with served(llm) as one, on_port(one) as address:
        num_steps = count_steps(one, STEP)
        connection = send_raw(address, path, body | {"stream": is_stream, "n": 2})
        if is_stream:
            connection.recv(1)
        wait_until(lambda: len(llm.engine.running) == 2)
        connection.close()
        before = len(num_steps)
        wait_until(one.is_idle)
        assert len(num_steps) - before <= 3, "two steps after the one that was running"
        one.restore()
        answer = httpx.post(address + TEXTS, json=TEXT, timeout=60).json()
        (want,) = reference.generate(TEXT["prompt"], SamplingParams(temperature=0, max_tokens=12))
        assert answer["choices"][0]["text"] == want.outputs[0].text


def test_a_client_that_goes_before_its_body_is_whole_is_no_fault_of_ours(llm):
    def count(status):
        labels = {"route": TEXTS, "status": status}
        return one.app.state.metrics.registry.get_sample_value("hispec:http_requests_total", labels) or 0

    with served(llm) as one, on_port(one) as address:
        host, port = address.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as connection:
            head = f"POST {TEXTS} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n"
            connection.sendall(head.encode() + b"{")
            time.sleep(0.1)
        wait_until(lambda: count("499") == 1)
        assert count("500") == 0


@pytest.mark.parametrize("is_stream", [True, False])
def test_a_client_that_goes_while_it_waits_leaves_the_queue(narrow, is_stream, reference):
    with served(narrow) as one, on_port(one) as address:
        one.slow_down(STEP)
        with httpx.Client(base_url=address, timeout=60) as client:
            running = in_thread(lambda: client.post(TEXTS, json=LONG))
            wait_until(lambda: len(narrow.engine.running) == 1)
            (first,) = narrow.engine.running
            connection = send_raw(address, TEXTS, LONG | {"stream": is_stream})
            wait_until(lambda: len(narrow.engine.waiting) == 1)
            connection.close()
            wait_until(lambda: not narrow.engine.waiting and len(one.gate.tickets) == 1)
            assert narrow.engine.running == [first], "the one that runs is not disturbed, nor has it ended"
            one.restore()
            (want,) = reference.generate("a", SamplingParams(temperature=0, max_tokens=NUM_LONG, ignore_eos=True))
            assert running().json()["choices"][0]["text"] == want.outputs[0].text


def test_the_official_client_may_stop_reading(llm):
    with served(llm) as one, on_port(one) as address:
        one.slow_down(STEP)
        stream = official(address).chat.completions.create(**CHAT | {"max_tokens": NUM_LONG, "stream": True})
        next(iter(stream))
        stream.close()
        wait_until(one.is_idle, 2)


def test_a_client_that_reads_nothing_is_dropped_in_the_end(llm, monkeypatch):
    """Its answer is made larger than what the kernel takes for it."""
    monkeypatch.setattr("infer.server.shapes.chat_logprobs", lambda *args: ["x" * 2_000_000])
    with served(llm, send_timeout=0.3) as one, on_port(one) as address:
        body = CHAT | {"stream": True, "logprobs": True, "max_tokens": 20}
        connection = send_raw(address, CHATS, body)
        wait_until(lambda: one.gate.tickets)
        wait_until(one.is_idle)
        connection.close()


# ---- too many, too long ----


def test_a_full_queue_is_told_when_to_come_again(narrow):
    async def main():
        async with in_process(one) as client:
            tasks = [asyncio.create_task(client.post(TEXTS, json=LONG)) for _ in range(3)]
            await until(lambda: one.gate.num_texts == 3)
            one.restore()
            refused = await client.post(TEXTS, json=TEXT)
            assert code(refused) == (429, "queue_full") and 1 <= int(refused.headers["Retry-After"]) <= 60
            assert refused.json()["error"]["type"] == "rate_limit_error"
            stream = await client.post(TEXTS, json=TEXT | {"stream": True})
            assert stream.status_code == 429, "not a stream that begins and then fails"
            assert [(await task).status_code for task in tasks] == [200] * 3
            assert (await client.post(TEXTS, json=TEXT)).status_code == 200
            too_many = await client.post(TEXTS, json=TEXT | {"n": 4})
            assert (too_many.status_code, too_many.json()["error"]["param"]) == (400, "n"), "it would never fit"

    with served(narrow, max_queue=2) as one:
        one.slow_down(STEP)
        asyncio.run(main())


def test_the_official_client_comes_again_by_itself(narrow):
    with served(narrow, max_queue=0) as one, on_port(one) as address:
        one.slow_down(STEP)
        running = in_thread(lambda: httpx.post(address + TEXTS, json=LONG, timeout=60))
        wait_until(lambda: one.gate.num_texts == 1)
        with pytest.raises(openai.RateLimitError):
            official(address).completions.create(**TEXT)
        one.restore()
        assert official(address, max_retries=9).completions.create(**TEXT).choices[0].text
        assert running().status_code == 200


def test_a_clock_that_jumps_ends_no_request_and_changes_no_text(llm, monkeypatch):
    with served(llm, request_timeout=30) as one, on_port(one) as address:
        client = official(address)
        calm = client.completions.create(**TEXT).choices[0].text
        now, jumps = time.time, itertools.cycle([0, 3e8, -3e8])  # years
        monkeypatch.setattr(time, "time", lambda: now() + next(jumps))
        assert client.completions.create(**TEXT).choices[0].text == calm
        streamed = [chunk.choices[0].text for chunk in client.completions.create(**TEXT, stream=True)]
        assert "".join(streamed) == calm


@pytest.mark.parametrize("is_waiting", [False, True])
def test_a_request_ends_at_its_deadline_running_or_waiting(narrow, is_waiting):
    async def main():
        async with in_process(one) as client:
            first = asyncio.create_task(client.post(TEXTS, json=LONG))
            await until(lambda: narrow.engine.running)
            if is_waiting:
                stream = await client.post(TEXTS, json=LONG | {"stream": True})
                assert sse(stream)[-1]["error"]["code"] == "request_timeout"
            assert code(await first) == (504, "request_timeout")
            await until(one.is_idle)

    with served(narrow, request_timeout=0.3) as one:
        one.slow_down(STEP)
        asyncio.run(main())


def test_200_streams_at_once_are_all_answered(llm):
    async def main():
        async with in_process(one) as client:
            bodies = [
                TEXT | {"stream": True, "max_tokens": 2, "prompt": [5, i], "ignore_eos": True} for i in range(200)
            ]
            answers = await asyncio.gather(*(client.post(TEXTS, json=body) for body in bodies))
            assert [sse(answer)[-1]["choices"][0]["finish_reason"] for answer in answers] == ["length"] * 200

    with served(llm) as one:
        asyncio.run(main())


# ---- engines that die or hang (D11) ----


def test_a_dead_engine_is_unhealthy_and_tells_everybody(llm):
    def die():
        time.sleep(0.1)
        raise MemoryError("a bug")

    async def main():
        async with in_process(one) as client:
            llm.engine.step = die
            whole, stream = await asyncio.gather(
                client.post(TEXTS, json=TEXT), client.post(TEXTS, json=TEXT | {"stream": True})
            )
            assert code(whole) == (503, "engine_dead")
            assert sse(stream)[-1]["error"]["code"] == "engine_dead"
            for path in ("/health", "/ready"):
                assert code(await client.get(path)) == (503, "engine_dead")
            assert code(await client.post(TEXTS, json=TEXT)) == (503, "engine_dead")
            assert (await client.get("/metrics")).status_code == 200

    engine = llm.engine
    with served(llm) as one:
        asyncio.run(main())
        one.restore()
        for request in [*engine.waiting, *engine.running]:  # what the fault left, for the tests to come
            engine.abort(request.request_id)


def test_a_step_that_hangs_is_unhealthy_and_the_waiting_are_told(llm):
    release = threading.Event()
    step = type(llm.engine).step

    def hang():
        release.wait(10)
        return step(llm.engine)

    async def main():
        async with in_process(one) as client:
            llm.engine.step = hang
            whole, stream = await asyncio.gather(
                client.post(TEXTS, json=TEXT), client.post(TEXTS, json=TEXT | {"stream": True})
            )
            assert code(whole) == (503, "engine_stuck")
            assert sse(stream)[-1]["error"]["code"] == "engine_stuck"
            assert code(await client.get("/health")) == (503, "engine_stuck")
            assert code(await client.post(TEXTS, json=TEXT)) == (503, "engine_stuck")
            one.restore()
            release.set()
            await until(one.is_idle)
            assert (await client.get("/health")).status_code == 200, "it was only slow"
            assert (await client.post(TEXTS, json=TEXT)).status_code == 200

    with served(llm, stuck_timeout=1.5) as one:
        asyncio.run(main())


# ---- servers that stop ----


def test_a_server_that_stops_lets_running_requests_finish_and_nobody_in(llm, reference):
    (want,) = reference.generate("a", SamplingParams(temperature=0, max_tokens=NUM_LONG, ignore_eos=True))
    with served(llm) as one, on_port(one) as address, httpx.Client(base_url=address, timeout=60) as client:
        one.slow_down(STEP)
        whole = in_thread(lambda: client.post(TEXTS, json=LONG))
        stream = in_thread(lambda: httpx.post(address + TEXTS, json=LONG | {"stream": True}, timeout=60))
        wait_until(lambda: len(llm.engine.running) == 2)
        one.gate.drain()
        refused = client.post(TEXTS, json=TEXT)
        assert code(refused) == (503, "shutting_down") and refused.headers["Retry-After"]
        assert code(client.get("/ready")) == (503, "shutting_down")
        assert client.get("/health").status_code == 200
        one.restore()
        assert whole().json()["choices"][0]["text"] == want.outputs[0].text
        text = "".join(choice["text"] for chunk in sse(stream()) for choice in chunk["choices"])
        assert text == want.outputs[0].text
        wait_until(lambda: not is_listening(address))


def test_what_is_not_done_when_time_is_up_ends_with_an_error(llm):
    with served(llm, drain_timeout=0.3) as one, on_port(one) as address:
        one.slow_down(STEP)
        whole = in_thread(lambda: httpx.post(address + TEXTS, json=LONG, timeout=60))
        stream = in_thread(lambda: httpx.post(address + TEXTS, json=LONG | {"stream": True}, timeout=60))
        wait_until(lambda: len(llm.engine.running) == 2)
        one.gate.drain()
        assert code(whole()) == (503, "shutting_down")
        assert sse(stream())[-1]["error"]["code"] == "shutting_down"
        wait_until(lambda: not is_listening(address))


def test_a_server_where_nothing_runs_still_tells_those_who_come_when_it_stops(llm):
    with served(llm) as one, on_port(one) as address:
        began = time.monotonic()
        one.gate.drain(stay_open=0.6)
        assert code(httpx.post(address + TEXTS, json=TEXT)) == (503, "shutting_down")
        wait_until(lambda: not is_listening(address))
        assert time.monotonic() - began >= 0.6


def test_sigterm_keeps_the_port_open_and_ctrl_c_does_not(llm):
    with served(llm) as one:
        config = uvicorn.Config(one.app)
        stays = []
        for sig in (signal.SIGTERM, signal.SIGINT):
            gate = Gate(one.engine, settings())
            server = DrainingServer(config, gate)
            server.handle_exit(sig, None)
            assert gate.is_draining and not server.should_exit
            stays.append(not gate.is_drained())
            server.handle_exit(sig, None)
            assert server.force_exit, "the second one ends it at once"
        assert stays == [True, False]


# ---- figures and logs ----


def test_metrics_count_what_was_done(llm):
    async def main():
        async with in_process(one) as client:
            before = samples(await client.get("/metrics"))
            answer = (await client.post(TEXTS, json=TEXT | {"n": 2})).json()
            await client.post(TEXTS, json=TEXT | {"stream": True})
            await client.post(TEXTS, json={})
            await client.get("/nope")
            return answer, before, samples(await client.get("/metrics"))

    with served(llm) as one:
        answer, before, after = asyncio.run(main())
        stats = dict(zip(llm.judge_names, llm.engine.round.stats, strict=True))
    names = 'model_name="tiny"'
    usage = answer["usage"]
    assert after[f"hispec:prompt_tokens_total{{{names}}}"] == 2 * usage["prompt_tokens"]
    assert after[f"hispec:generation_tokens_total{{{names}}}"] == usage["completion_tokens"] * 3 / 2
    assert after[f'hispec:request_success_total{{finished_reason="length",{names}}}'] == 3
    for name in ("time_to_first_token", "e2e_request_latency", "time_per_output_token"):
        assert after[f"hispec:{name}_seconds_count{{{names}}}"] == 2
        assert after[f"hispec:{name}_seconds_sum{{{names}}}"] > 0
    for route, status, num in (("/v1/completions", 200, 2), ("/v1/completions", 400, 1), ("", 404, 1)):
        assert after[f'hispec:http_requests_total{{route="{route}",status="{status}"}}'] == num
    for tier in ("intermediate", "target"):
        for name, value in (
            ("drafts", stats[tier].num_drafts),
            ("draft_tokens", stats[tier].num_draft_tokens),
            ("accepted_tokens", stats[tier].num_accepted),
        ):
            full = f'hispec:spec_decode_num_{name}_total{{{names},tier="{tier}"}}'
            assert after[full] == value
            assert after[full] > before[full] or name == "accepted_tokens"
    assert after[f"hispec:num_requests_running{{{names}}}"] == after[f"hispec:kv_cache_usage_perc{{{names}}}"] == 0


def test_two_apps_have_metrics_of_their_own(llm):
    for _ in range(2):  # a global registry would refuse the second
        with served(llm) as one:
            assert one.app.state.metrics.registry


@pytest.mark.parametrize("log_prompts", [False, True])
def test_the_log_is_json_without_prompts_or_keys(llm, log_prompts):
    from infer.server.logs import JsonFormatter

    lines = []

    class Keep(logging.Handler):
        def emit(self, record):
            lines.append(json.loads(JsonFormatter().format(record)))

    handler, logger = Keep(), logging.getLogger("infer")
    logger.addHandler(handler)
    level = logger.level
    logger.setLevel(logging.INFO)
    try:
        with served(llm, api_keys=("sesame",), log_prompts=log_prompts) as one:

            async def main():
                async with in_process(one, Authorization="Bearer sesame") as client:
                    await client.post(TEXTS, json=TEXT | {"prompt": "my secret"})
                    await client.post(CHATS, json=CHAT | {"messages": [{"role": "user", "content": "my secret"}]})
                    await client.post(TEXTS, json=TEXT | {"prompt": "my secret" * 100})
                    await client.post(TEXTS, content=b"my secret", headers={"Content-Type": "application/json"})

            asyncio.run(main())
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    lines = [line for line in lines if line["message"] == "request"]
    assert [(line["status"], line["path"]) for line in lines] == [
        (200, TEXTS),
        (200, CHATS),
        (400, TEXTS),
        (400, TEXTS),
    ]
    assert lines[0]["completion_tokens"] == 12 and lines[0]["finish_reasons"] == ["length"] and lines[0]["request_id"]
    text = json.dumps(lines)
    assert "sesame" not in text and ("my secret" in text) == log_prompts


# ---- helpers ----


def count_steps(one, seconds):
    """A list that grows by one with every step, each of which takes so much longer."""
    steps, step = [], type(one.llm.engine).step

    def counting_step():
        time.sleep(seconds)
        steps.append(time.monotonic())
        return step(one.llm.engine)

    one.llm.engine.step = counting_step
    return steps


def in_thread(call):
    """Begin it; the result when called."""
    results = []
    thread = threading.Thread(target=lambda: results.append(call()))
    thread.start()

    def result():
        thread.join(60)
        return results[0]

    return result


def is_listening(address):
    try:
        return httpx.get(address + "/health").status_code > 0
    except httpx.TransportError:
        return False


def samples(response):
    lines = (line.rsplit(" ", 1) for line in response.text.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, value in lines}
