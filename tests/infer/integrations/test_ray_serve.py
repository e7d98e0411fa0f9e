"""Ray Serve over two local replicas: OpenAI's own client gets the texts of `LLM`."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import httpx
import openai
import pytest

pytest.importorskip("ray.serve", reason="needs the extra `ray`")

from infer import LLM, SamplingParams
from infer.integrations.ray_serve import Replicas, app, build_app
from infer.server.settings import Settings
from tests.infer.integrations.processes import until, workers
from tests.tiny_engine import DEVICE

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("cluster")]

TEXTS = ["Hello, river!", "stones", "the sea and the people", "A small text"]
MAX_TOKENS = 12


@pytest.fixture
def address(cluster: None, shared_artifact: Path) -> Iterator[str]:
    from ray import serve

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    application = build_app(
        str(shared_artifact),
        Settings(model="tiny"),
        engine={"strategy": "hispec", "device": str(DEVICE)},
        replicas=Replicas(num=2, num_cpus=0.5),
    )
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    serve.run(application, name="hispec", route_prefix="/")
    yield f"http://127.0.0.1:{port}"
    assert len(workers("hispec")) == 2
    serve.shutdown()
    until(lambda: not workers("hispec"), "the replicas' end")
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"http://127.0.0.1:{port}/health")


def chat(client: openai.OpenAI, text: str, *, stream: bool) -> str:
    asked = {
        "model": "tiny",
        "messages": [{"role": "user", "content": text}],
        "max_tokens": MAX_TOKENS,
        "temperature": 0.9,
        "seed": 7,
    }
    if not stream:
        return client.chat.completions.create(**asked).choices[0].message.content
    chunks = [chunk for chunk in client.chat.completions.create(**asked, stream=True) if chunk.choices]
    assert len(chunks) > 2 and chunks[-1].choices[0].finish_reason
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


def test_openai_s_client_gets_llm_s_texts_from_every_replica(address, reference: LLM):
    params = SamplingParams(temperature=0.9, seed=7, max_tokens=MAX_TOKENS)
    outputs = reference.chat([[{"role": "user", "content": text}] for text in TEXTS], params)
    want = [output.outputs[0].text for output in outputs]
    client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=240)
    assert [model.id for model in client.models.list()] == ["tiny"]
    with ThreadPoolExecutor(4) as pool:  # so that one replica alone would be busy
        for stream in (False, True, False, True):
            assert list(pool.map(partial(chat, client, stream=stream), TEXTS)) == want
    (plain,) = reference.generate("Hello", SamplingParams(temperature=0, max_tokens=5))
    done = client.completions.create(model="tiny", prompt="Hello", max_tokens=5, temperature=0)
    assert done.choices[0].text == plain.outputs[0].text
    with pytest.raises(openai.NotFoundError, match="does not exist here"):
        client.completions.create(model="other", prompt="Hello")
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.completions.create(model="tiny", prompt="Hello", temperature=-1)

    both = workers("hispec")
    os.kill(min(both), signal.SIGKILL)
    until(lambda: len(workers("hispec") - both) == 1, "a new replica")
    retrying = client.with_options(max_retries=5)
    assert [chat(retrying, text, stream=False) for text in TEXTS] == want


def test_options_become_serve_s(shared_artifact):
    given = {"artifact": str(shared_artifact), "num_replicas": 2, "max_replicas": 5, "max_num_seqs": 8, "max_queue": 3}
    deployment = app(given)._bound_deployment
    scaling = deployment._deployment_config.autoscaling_config
    assert (scaling.min_replicas, scaling.max_replicas, scaling.target_ongoing_requests) == (2, 5, 8)
    assert deployment.max_ongoing_requests == 11
    assert app({"artifact": str(shared_artifact), "num_replicas": 3})._bound_deployment.num_replicas == 3
