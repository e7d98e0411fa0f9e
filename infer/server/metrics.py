"""What Prometheus reads: vLLM's names with `hispec:` in place of `vllm:`. One registry per app.

What the engine counts itself is read from it when asked for; what belongs to a request is noted when it happens.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from infer.output import RequestOutput
from infer.server.gate import Gate

_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5)
_FIRST_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0)
_REQUEST_SECONDS = (0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 240.0, 600.0)

_PREFIX = "hispec:"


class Metrics:
    def __init__(self, gate: Gate) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_EngineCollector(gate))
        labels, registry, self._model = ("model_name",), self.registry, gate.settings.model

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(_PREFIX + name, text, labels, buckets=buckets, registry=registry).labels(self._model)

        def counter(name: str, text: str) -> Counter:
            return Counter(_PREFIX + name, text, labels, registry=registry).labels(self._model)

        self._first = histogram("time_to_first_token_seconds", "From admission to the first token.", _FIRST_SECONDS)
        self._each = histogram("time_per_output_token_seconds", "Mean of a request's later tokens.", _TOKEN_SECONDS)
        self._request = histogram("e2e_request_latency_seconds", "From admission to the end.", _REQUEST_SECONDS)
        self._prompt = counter("prompt_tokens", "Tokens of prompts that were answered.")
        self._generated = counter("generation_tokens", "Tokens that were generated for answers.")
        self._success = Counter(
            _PREFIX + "request_success",
            "Texts by how they ended.",
            labelnames=("model_name", "finished_reason"),
            registry=registry,
        )
        self._http = Counter(
            _PREFIX + "http_requests",
            "Requests by route and status; 499 is a client that went away.",
            labelnames=("route", "status"),
            registry=registry,
        )

    def note_http(self, route: str, status: int) -> None:
        self._http.labels(route, str(status)).inc()

    def note_first_token(self, seconds: float) -> None:
        self._first.observe(seconds)

    def note_finished(self, output: RequestOutput) -> None:
        """One prompt's texts are complete."""
        self._prompt.inc(len(output.prompt_token_ids))
        self._generated.inc(sum(len(text.token_ids) for text in output.outputs))
        if output.metrics.time_per_output_token is not None:
            self._each.observe(output.metrics.time_per_output_token)
        for text in output.outputs:
            self._success.labels(self._model, text.finish_reason).inc()

    def note_request(self, seconds: float) -> None:
        self._request.observe(seconds)


class _EngineCollector(Collector):
    """The engine's own counts, read from another thread: single numbers, each right in itself."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        llm, model = self._gate.engine.llm, self._gate.settings.model
        engine, num_usable = llm.engine, llm.engine.pool.num_blocks - 1
        gauges = {
            "num_requests_running": ("Texts in the batch.", len(engine.running)),
            "num_requests_waiting": (
                "Texts that were admitted and wait for a place in the batch.",
                max(0, self._gate.num_texts - len(engine.running)),
            ),
            "kv_cache_usage_perc": ("Share of the KV blocks in use.", 1 - engine.pool.num_free / num_usable),
        }
        for name, (text, value) in gauges.items():
            gauge = GaugeMetricFamily(_PREFIX + name, text, labels=("model_name",))
            gauge.add_metric((model,), value)
            yield gauge
        preemptions = CounterMetricFamily(
            _PREFIX + "num_preemptions", "Rows that had to give their blocks back.", labels=("model_name",)
        )
        preemptions.add_metric((model,), engine.num_preemptions)
        yield preemptions
        yield from self._spec_decode(model)

    def _spec_decode(self, model: str) -> Iterator[CounterMetricFamily]:
        llm = self._gate.engine.llm
        # The first stage of several only proposes, so it judges nothing
        judges = list(zip(llm.judge_names, llm.engine.round.stats, strict=True))[1:]
        for name, attribute, text in (
            ("spec_decode_num_drafts", "num_drafts", "Rounds in which something was proposed to this tier."),
            ("spec_decode_num_draft_tokens", "num_draft_tokens", "Tokens proposed to this tier."),
            ("spec_decode_num_accepted_tokens", "num_accepted", "Tokens that this tier accepted."),
        ):
            counter = CounterMetricFamily(_PREFIX + name, text, labels=("model_name", "tier"))
            for tier, stats in judges:
                counter.add_metric((model, tier), getattr(stats, attribute))
            yield counter
