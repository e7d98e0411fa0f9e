"""`python -m infer serve`: starts, serves over TLS, stops when told, and says what it misses."""

import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import time
from pathlib import Path

import httpx
import openai
import pytest

from infer.async_llm import AsyncLLM
from infer.cli import _parser, main
from infer.params import SamplingParams
from tests.infer.server.harness import on_port, served
from tests.tiny_artifact import ON_DEVICE

ROOT = Path(__file__).parents[3]


def test_help_comes_without_the_packages_of_the_server():
    program = (
        "import sys; from infer.cli import main\n"
        "try: main(['serve', '--help'])\n"
        "except SystemExit: pass\n"
        "assert not {'torch', 'fastapi', 'uvicorn', 'pydantic', 'starlette'} & set(sys.modules), sys.modules.keys()"
    )
    began = time.monotonic()
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "--max-queue" in result.stdout and time.monotonic() - began < 10  # far from torch's, on a busy machine too


@pytest.mark.parametrize("package", ["fastapi", "uvicorn", "sse_starlette", "prometheus_client"])
def test_a_missing_package_is_named_with_the_remedy(package):
    program = (
        f"import sys; sys.modules['{package}'] = None\nfrom infer.cli import main\nsys.exit(main(['serve', 'nowhere']))"
    )
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 2
    assert package in result.stderr and "pip install 'hispec[serve]'" in result.stderr


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--max-queue", "-1"], "max_queue=-1"),
        (["--api-key", ""], "api_key is empty"),
        (["--request-timeout", "-3"], "request_timeout=-3"),
        (["--ssl-keyfile", "x"], "--ssl-certfile"),
        (["--max-body-mib", "0"], "max_body_bytes=0"),
    ],
)
def test_a_wrong_flag_is_one_line_and_exit_code_2(flags, reason, capsys):
    assert main(["serve", "nowhere", *flags]) == 2
    assert reason in capsys.readouterr().err


def test_a_key_may_come_from_the_environment(artifact, monkeypatch):
    seen = []
    monkeypatch.setenv("HISPEC_API_KEY", "from-env")
    monkeypatch.setattr("infer.commands.options.load_llm", lambda *args: None)
    monkeypatch.setattr("infer.server.run.serve", lambda llm, settings, address: seen.append((settings, address)))
    args = _parser().parse_args(["serve", str(artifact), "--api-key", "flag", "--port", "0"])
    assert args.run(args) == 0
    settings, address = seen[0]
    assert settings.api_keys == ("flag", "from-env") and settings.model == artifact.name
    assert address.host == "127.0.0.1", "not open to the network unless asked to"


@pytest.mark.parametrize(
    ("flags", "hosts"),
    [
        ([], {"localhost", "127.0.0.1", "::1"}),
        (["--api-key", "x"], set()),
        (["--host", "0.0.0.0"], set()),
        (["--allowed-hosts", "a.example", "b.example"], {"a.example", "b.example"}),
        (["--allowed-hosts", "*"], set()),
    ],
)
def test_a_server_for_this_machine_without_keys_is_called_by_its_names_alone(artifact, monkeypatch, flags, hosts):
    seen = []
    monkeypatch.setattr("infer.commands.options.load_llm", lambda *args: None)
    monkeypatch.setattr("infer.server.run.serve", lambda llm, settings, address: seen.append(settings))
    args = _parser().parse_args(["serve", str(artifact), *flags])
    assert args.run(args) == 0 and set(seen[0].allowed_hosts) == hosts


def test_sigterm_ends_a_server_that_still_loads(artifact, monkeypatch):
    """A handler of our own: without one, a container's first process would ignore the signal."""
    before = signal.getsignal(signal.SIGTERM)

    def load(*_):
        assert signal.getsignal(signal.SIGTERM) not in (before, signal.SIG_DFL)
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr("infer.commands.options.load_llm", load)
    args = _parser().parse_args(["serve", str(artifact)])
    with pytest.raises(SystemExit) as ended:
        args.run(args)
    assert ended.value.code == 128 + signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) == before


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.parametrize("hangs", [False, True])
def test_an_engine_that_hangs_ends_the_process_with_a_code_and_no_other_does(llm, monkeypatch, hangs):
    from infer.server import run

    codes, shutdown = [], AsyncLLM.shutdown
    monkeypatch.setattr(run.DrainingServer, "run", lambda self: None)
    monkeypatch.setattr(AsyncLLM, "shutdown", lambda self, timeout: shutdown(self, timeout) and not hangs)
    monkeypatch.setattr(run.logging, "shutdown", lambda *_: None)  # pytest's own handlers
    monkeypatch.setattr(run.os, "_exit", codes.append)
    run.serve(llm, run.Settings(model="tiny"), run.Address(host="127.0.0.1", port=1))
    assert codes == [1] * hangs


HANGING = """
import sys, time
from infer.cli import main
from infer.engine import Engine
from infer.llm import LLM
from infer.server import run

run._ENGINE_SECONDS = 0.5
Engine.step = LLM.chat_prompt = lambda *_: time.sleep(600)
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_a_process_whose_engine_and_tokenizer_hang_ends_on_sigterm(artifact, tmp_path):
    port, log = free_port(), tmp_path / "log"
    command = [sys.executable, "-c", HANGING, "serve", str(artifact), "--strategy", "autoregressive"]
    flags = ["--port", str(port), "--drain-timeout", "0.3", *ON_DEVICE]
    with log.open("wb") as stderr:
        process = subprocess.Popen([*command, *flags], cwd=ROOT, stderr=stderr, env=os.environ)
    try:
        address = f"http://127.0.0.1:{port}"
        wait_for(address + "/ready", process)
        bodies = {"completions": {"prompt": "a"}, "chat/completions": {"messages": [{"role": "user", "content": "a"}]}}
        for path, body in bodies.items():
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(f"{address}/v1/{path}", json=body, timeout=0.5)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 1
    finally:
        process.kill()
        process.wait()
    said = log.read_text()
    assert "the engine has been at one step" in said and "the tokenizer has not ended" in said


@pytest.mark.slow
def test_a_process_serves_and_ends_gracefully_on_sigterm(artifact, reference, tmp_path):
    port, log = free_port(), tmp_path / "log"
    command = [sys.executable, "-m", "infer", "serve", str(artifact), "--strategy", "layerskip", "--port", str(port)]
    with log.open("wb") as stderr:
        process = subprocess.Popen([*command, *ON_DEVICE], cwd=ROOT, stderr=stderr, env=os.environ)
    try:
        address = f"http://127.0.0.1:{port}"
        wait_for(address + "/ready", process)
        client = openai.OpenAI(base_url=address + "/v1", api_key="none", max_retries=0)
        many = {"model": artifact.name, "prompt": "a", "max_tokens": 40, "temperature": 0, "n": 4}
        stream = iter(client.completions.create(**many, stream=True, extra_body={"ignore_eos": True}))
        chunks = [next(stream)]
        process.send_signal(signal.SIGTERM)
        chunks += stream
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()
    choices = [choice for chunk in chunks for choice in chunk.choices if choice.index == 3]
    (want,) = reference.generate("a", SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
    assert "".join(choice.text for choice in choices) == want.outputs[0].text
    assert choices[-1].finish_reason == "length"
    lines = log.read_text().splitlines()
    assert any('"path": "/v1/completions", "status": 200' in line for line in lines), lines


def wait_for(url, process):
    for _ in range(1200):
        assert process.poll() is None, "the server ended"
        try:
            if httpx.get(url).status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.1)
    raise AssertionError("the server does not start")


def test_the_client_of_the_docs_runs(llm, capsys):
    (snippet,) = re.findall(
        r"```python\n(from openai.+?)```", (ROOT / "docs" / "serve.md").read_text(), flags=re.DOTALL
    )
    with served(llm, model="smollm2-135m") as one, on_port(one) as address:
        exec(snippet.replace("http://127.0.0.1:8000", address).replace("rivers.", "me"), {})  # a short context
    assert capsys.readouterr().out.strip()


def test_a_port_that_is_taken_is_said(llm):
    from infer.server.run import Address, serve
    from infer.server.settings import Settings

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=f"127.0.0.1:{port}"):
            serve(llm, Settings(model="tiny"), Address(host="127.0.0.1", port=port))


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tls")
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days",
               "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1",
               "-keyout", str(folder / "key.pem"), "-out", str(folder / "cert.pem")]  # fmt: skip
    try:
        subprocess.run(command, check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("needs openssl to make a certificate")
    return folder


def test_tls_is_by_flags(llm, certificate):
    files = {"ssl_certfile": str(certificate / "cert.pem"), "ssl_keyfile": str(certificate / "key.pem")}
    with served(llm) as one, on_port(one, **files) as address:
        assert address.startswith("https:")
        trusted = ssl.create_default_context(cafile=files["ssl_certfile"])
        assert httpx.get(address + "/health", verify=trusted).status_code == 200
        with pytest.raises(httpx.TransportError):
            httpx.get(address + "/health")


def test_serve_hands_the_flags_on(llm, certificate, monkeypatch):
    from infer.server import run

    configs = []
    monkeypatch.setattr(run.DrainingServer, "run", lambda self: configs.append(self.config))
    files = {"ssl_certfile": str(certificate / "cert.pem"), "ssl_keyfile": str(certificate / "key.pem")}
    run.serve(llm, run.Settings(model="tiny"), run.Address(host="127.0.0.1", port=1, **files))
    assert configs[0].is_ssl and not configs[0].server_header
    with pytest.raises(ValueError, match="ssl_certfile='nowhere' can't be used"):
        run.serve(llm, run.Settings(model="tiny"), run.Address(host="127.0.0.1", port=1, ssl_certfile="nowhere"))
