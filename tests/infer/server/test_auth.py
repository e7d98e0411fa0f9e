"""With a key set, nothing but the probes is open, under any spelling."""

import asyncio
import hmac

import openai
import pytest

from infer.server.guard import OPEN_PATHS
from infer.server.settings import names_of_loopback
from tests.infer.server.harness import CHAT, in_process, official, on_port, served

KEYS = ("sesame", "schlüssel")


@pytest.fixture(scope="module")
def one(llm):
    with served(llm, api_keys=KEYS) as one:
        yield one


def statuses(one, calls):
    """Of (method, path, Authorization or None), past every client that would tidy the path."""

    async def main():
        found = []
        for method, path, key in calls:
            headers = [] if key is None else [(b"authorization", key if isinstance(key, bytes) else key.encode())]
            scope = {
                "type": "http", "http_version": "1.1", "method": method, "path": path, "raw_path": path.encode(),
                "query_string": b"", "root_path": "", "scheme": "http", "headers": headers, "server": ("test", 80),
            }  # fmt: skip

            async def receive():
                return {"type": "http.request", "body": b"", "more_body": False}

            async def send(message):
                if message["type"] == "http.response.start":
                    found.append(message["status"])

            await one.app(scope, receive, send)
        return found

    return asyncio.run(main())


def test_every_route_is_closed_without_a_key(one):
    """D10"""
    paths = {route.path.replace("{name:path}", "x") for route in one.app.routes}
    assert {"/v1/chat/completions", "/v1/completions", "/metrics", "/openapi.json", "/health"} <= paths
    spellings = [
        spelled
        for path in [*paths, "/", "/nope", "/docs"]
        for spelled in (path, path + "/", "/" + path, path.upper(), path.replace("/", "/./", 1), path + "/../models")
        if spelled not in OPEN_PATHS
    ]
    calls = [(m, s, None) for s in spellings for m in ("GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE")]
    calls += [(m, "/v1/models", k) for m in ("GET",) for k in ("", "Bearer", "Bearer ", "Bearer sesam", "Basic sesame",
              "Bearer sesame2", "sesame", "Bearer SESAME", "Bearer schl")]  # fmt: skip
    assert dict.fromkeys(statuses(one, calls)) == {401: None}


def test_the_probes_are_open(one):
    assert statuses(one, [(m, p, None) for p in OPEN_PATHS for m in ("GET", "HEAD")]) == [200] * 4


def test_every_key_opens(one):
    calls = [("GET", "/v1/models", f"{scheme} {key}".encode()) for key in KEYS for scheme in ("Bearer", "bearer")]
    assert statuses(one, calls) == [200] * 4


def test_a_key_out_of_a_file_may_end_its_line(llm):
    with served(llm, api_keys=("sesame\n",)) as one:
        assert statuses(one, [("GET", "/v1/models", "Bearer sesame"), ("GET", "/v1/models", "Bearer")]) == [200, 401]


def test_only_the_servers_own_names_are_answered(llm):
    """A page whose name was made to point here sends that name."""

    async def main():
        async with in_process(one) as client:
            for path, host, status in [
                *(("/v1/models", host, 200) for host in ("localhost:8000", "LOCALHOST.", "127.0.0.1", "[::1]:8000")),
                *(
                    ("/v1/models", host, 403)
                    for host in ("evil.example:8000", "localhost.evil.example", "", "[", "x:y")
                ),
                ("/health", "10.0.0.7:8000", 200),  # Kubernetes' probes
            ]:
                response = await client.get(path, headers={"Host": host})
                assert response.status_code == status, host
                assert status == 200 or response.json()["error"]["code"] == "host_not_allowed"

    with served(llm, allowed_hosts=names_of_loopback("127.0.0.1")) as one:
        asyncio.run(main())


@pytest.mark.parametrize(
    ("host", "names"),
    [("127.0.0.1", True), ("localhost", True), ("::1", True), ("0.0.0.0", False), ("", False), ("my.box", False)],
)
def test_names_are_those_of_loopback_alone(host, names):
    assert (host in names_of_loopback(host)) == names
    assert ("localhost" in names_of_loopback(host)) == names


def test_all_keys_are_compared_in_constant_time(one, monkeypatch):
    compared, compare = [], hmac.compare_digest

    class Spy:
        @staticmethod
        def compare_digest(a, b):
            compared.append((len(a), len(b)))
            return compare(a, b)

    monkeypatch.setattr("infer.server.guard.hmac", Spy)
    statuses(one, [("GET", "/v1/models", "Bearer sesame")])
    assert compared == [(32, 32)] * len(KEYS)


def test_the_official_client_brings_its_key(one):
    with on_port(one) as address:
        assert official(address, api_key="sesame").chat.completions.create(**CHAT).choices
        with pytest.raises(openai.AuthenticationError):
            official(address, api_key="wrong").chat.completions.create(**CHAT)
