"""The metrics endpoint, read with the parser of prometheus_client."""

import json
import socket
import time
import urllib.error
from dataclasses import replace
from typing import Any
from urllib.request import Request, urlopen

import pytest
from prometheus_client.parser import text_string_to_metric_families

from asyncrl.config.load import ConfigError
from asyncrl.config.schema import Config
from asyncrl.observability.sinks import prometheus
from asyncrl.observability.sinks.open import open_hub
from asyncrl.observability.sinks.prometheus import PrometheusSink
from asyncrl.observability.telemetry.recorder import Batch


@pytest.fixture
def sink():
    sink = PrometheusSink('a "quoted" run', "127.0.0.1", 0)
    yield sink
    sink.close(None)


def get(sink: PrometheusSink, path: str) -> tuple[int, str]:
    try:
        with urlopen(f"http://127.0.0.1:{sink.port}{path}", timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as e:
        return e.code, e.read().decode()


def samples(text: str) -> dict[str, tuple[str, dict[str, str], float]]:
    found = {}
    for family in text_string_to_metric_families(text):
        for s in family.samples:
            found[s.name + s.labels.get("actor", "")] = (family.type, s.labels, s.value)
    return found


def heard(actor: str, **parts: Any) -> Batch:
    return Batch(actor, at_s=1.0, **parts)


def test_gauges_are_last_values_and_counters_are_sums(sink):
    sink.metrics(1, {"actor/loss": 0.5, "critic/rewards/mean": 1, "perf/step_s": 2.0})
    sink.metrics(2, {"actor/loss": 0.25, "mtp/loss_1": float("nan"), "text": "left out", "perf/step_s": 2.0})
    sink.metrics(1, {"validation/accuracy": 0.5})  # of the first step, beside the second
    for _ in range(2):
        sink.spans(heard("replica/0", counters={"rollout/tokens": 17}, gauges={"fully_async/queue/depth": 3}))
    status, text = get(sink, "/metrics")
    found = samples(text)
    assert status == 200
    run = {"run": 'a "quoted" run'}
    assert found["asyncrl_actor_loss"] == ("gauge", run, 0.25)
    assert found["asyncrl_critic_rewards_mean"][2] == 1
    assert found["asyncrl_fully_async_queue_depth"][2] == 3
    assert found["asyncrl_rollout_tokens_total"] == ("counter", run, 34)
    assert found["asyncrl_seconds_since_heardreplica/0"][1] == run | {"actor": "replica/0"}
    assert found["asyncrl_step"][2] == 2
    assert not any("text" in name for name in found)


def test_a_gauge_and_a_counter_of_one_name_are_answered_in_the_plain_format(sink):
    """OpenMetrics, which Prometheus prefers, does not allow both."""
    sink.metrics(1, {"rollout/restarted_samples": 2})
    sink.spans(Batch("rollouter", counters={"rollout/restarted_samples": 3}))
    request = Request(f"http://127.0.0.1:{sink.port}/metrics", headers={"Accept": "application/openmetrics-text"})
    with urlopen(request, timeout=10) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain")
        found = samples(answer.read().decode())
    assert found["asyncrl_rollout_restarted_samples"][::2] == ("gauge", 2)
    assert found["asyncrl_rollout_restarted_samples_total"][::2] == ("counter", 3)


def test_a_removed_replica_raises_no_alarm(sink):
    for name in ("replica/1", "replica/11"):
        sink.spans(heard(name))
    sink.left("replica/1")
    found = samples(get(sink, "/metrics")[1])
    assert [name for name in found if "replica" in name] == ["asyncrl_seconds_since_heardreplica/11"]
    assert list(json.loads(get(sink, "/health")[1])["seconds_since_heard"]) == ["replica/11"]
    sink.spans(heard("replica/1"))  # added again
    assert "asyncrl_seconds_since_heardreplica/1" in samples(get(sink, "/metrics")[1])


def test_health_is_503_when_no_actor_has_answered_the_driver(sink, monkeypatch):
    """Whatever the driver says of itself."""
    assert get(sink, "/health")[0] == 200  # while the run starts
    sink.spans(heard("trainer/0"))
    status, text = get(sink, "/health")
    assert (status, json.loads(text)["status"]) == (200, "ok")
    monkeypatch.setattr(prometheus, "SILENT_S", 0.5)
    time.sleep(0.6)
    sink.spans(heard("driver"))
    sink.spans(Batch("trainer/0"))  # not answered
    status, text = get(sink, "/health")
    assert (status, json.loads(text)["status"]) == (503, "no actor has answered the driver for 0.5 s")
    assert list(json.loads(text)["seconds_since_heard"]) == ["trainer/0"]
    assert get(sink, "/else")[0] == 404


def test_a_port_in_use_is_a_config_error(sink, tmp_path):
    config = Config()
    taken = replace(config.reporting.prometheus, port=sink.port)
    config = replace(config, reporting=replace(config.reporting, prometheus=taken))
    with pytest.raises(ConfigError, match=f"reporting.prometheus.port: {sink.port} cannot be served"):
        open_hub(config, tmp_path)


async def test_the_port_is_free_after_the_run():
    """Within an event loop, as in the driver."""
    first = PrometheusSink("run", "127.0.0.1", 0)
    first.close("it failed")
    PrometheusSink("run", "127.0.0.1", first.port).close(None)


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_an_incomplete_request_does_not_delay_close(method):
    sink = PrometheusSink("run", "127.0.0.1", 0)
    with socket.create_connection(("127.0.0.1", sink.port), 10) as client:
        client.sendall(f"{method} /metrics HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\nx".encode())
        assert client.recv(8) == b"HTTP/1.0"
        before_s = time.monotonic()
        sink.close(None)
        assert time.monotonic() - before_s < 5
