"""Quotas: the rate of each client, and their effect on the other clients."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton

from lathe.server.access.addresses import client_of
from lathe.server.access.authority import Authority
from lathe.server.access.keys import DamagedKeys, read_keys, write_keys
from lathe.server.access.quotas import Quota, Quotas
from lathe.server.access.scopes import Scope
from lathe.server.errors import QuotaExceeded
from lathe.server.serving.dataplane import DataPlane
from tests.server.access.test_access import call, new_key
from tests.server.api.grpc.wire import grpc_serving, tensor
from tests.server.fakes import doubler
from tests.server.repository.world import run, toy, world
from tests.server.running import rows, serving
from tests.server.service import service

BODY = {"inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}]}


def count_granted(quotas: Quotas, client: str, times: list[float], count: int = 1) -> int:
    given = 0
    for now in times:
        try:
            quotas.take(client, count, now)
        except QuotaExceeded:
            continue
        given += 1
    return given


def test_a_client_gets_its_burst_and_then_its_rate() -> None:
    quotas = Quotas(Quota(rate=10, burst=5))
    assert count_granted(quotas, "a", [0.0] * 20) == 5
    assert count_granted(quotas, "a", [step / 100 for step in range(1, 1001)]) in (99, 100)  # 10 s at 100 requests/s
    assert count_granted(quotas, "b", [10.0] * 20) == 5  # the bucket of another client is full
    assert count_granted(quotas, "a", [100.0] * 20) == 5  # after a long pause no more than a full bucket


def test_retry_after_is_the_time_until_the_bucket_suffices() -> None:
    quotas = Quotas(Quota(rate=2, burst=4))
    quotas.take("a", 4, 100.0)
    with pytest.raises(QuotaExceeded, match="2 rows per second and client, 4 at once") as raised:
        quotas.take("a", 3, 100.0)
    assert raised.value.retry_after == pytest.approx(1.5)
    with pytest.raises(QuotaExceeded):
        quotas.take("a", 3, 101.49)
    quotas.take("a", 3, 101.51)


def test_a_request_larger_than_the_bucket_is_accepted_when_it_is_full() -> None:
    quotas = Quotas(Quota(rate=10, burst=5))
    quotas.take("a", 100, 0.0)
    with pytest.raises(QuotaExceeded) as raised:
        quotas.take("a", 1, 1.0)
    assert raised.value.retry_after == pytest.approx(8.6)
    with pytest.raises(QuotaExceeded) as raised:
        quotas.take("a", 100, 1.0)
    assert raised.value.retry_after == pytest.approx(9.0)


def test_clients_with_full_buckets_are_forgotten() -> None:
    quotas = Quotas(Quota(rate=1, burst=1))
    for number in range(20_000):
        quotas.take(f"c{number}", 1, number / 100)
    assert len(quotas._full_at) < 9_000
    with pytest.raises(QuotaExceeded):
        quotas.take("c19999", 1, 199.99)


@pytest.mark.parametrize("transport", ["direct", "asgi"])
def test_a_request_over_the_quota_gets_429_with_retry_after(transport: str) -> None:
    with serving({"m": doubler()}, transport, client_rate=0.5, client_burst=3) as running:
        answers = [running.infer("m", BODY) for _ in range(4)]
        assert [answer.status for answer in answers] == [200, 200, 200, 429]
        assert answers[3].headers["retry-after"] == "2"
        assert "0.5 rows per second and client" in answers[3].error
        metrics = running.ask("GET", "/metrics").body.decode()
        assert 'nv_inference_request_failure{model="m",version="1",reason="quota_exceeded"} 1' in metrics


def test_a_request_costs_its_rows() -> None:
    with serving({"m": doubler()}, client_rate=0.5, client_burst=8) as running:
        x = {"inputs": [{"name": "x", "shape": [7, 4], "datatype": "FP32", "data": rows(7).tolist()}]}
        assert [running.infer("m", x).status, running.infer("m", BODY).status] == [200, 200]
        assert running.infer("m", BODY).status == 429


def test_http_and_grpc_share_a_bucket() -> None:
    with grpc_serving({"m": doubler()}, client_rate=0.5, client_burst=2) as (running, address):
        assert running.infer("m", BODY).status == 200
        with triton.InferenceServerClient(address) as client:
            client.infer("m", [tensor("x", rows(1), "FP32")])
            with pytest.raises(triton.InferenceServerException) as raised:
                client.infer("m", [tensor("x", rows(1), "FP32")])
            assert raised.value.status() == str(grpc.StatusCode.RESOURCE_EXHAUSTED)


def test_each_key_has_its_own_bucket(tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    admin, first, second = (new_key(keys, Scope) for _ in range(3))
    with service(tmp_path / "repo", keys_file=keys, client_rate=0.5, client_burst=2) as running:
        assert call(running, "POST", "/api/v1/models/m/versions", admin, content=toy(2.0)).status_code == 201
        statuses = [
            call(running, "POST", "/v2/models/m/infer", key, json=BODY).status_code
            for key in (first, first, first, second)
        ]
        assert statuses == [200, 200, 429, 200]


def test_a_models_owner_can_limit_each_client(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as w:
            await w.push(toy(2.0))
            (tmp_path / "m" / "config.toml").write_text("[client_quota]\nrate = 0.5\nburst = 2")
            await w.watcher.poll()
            await w.push(toy(3.0))  # a new version, the same bucket
            plane = DataPlane(w.registry, Authority("127.0.0.1", None))
            x = {"x": np.ones((1, 4), np.float32)}

            async def ask(client: str, version: str) -> None:
                servable = w.registry.resolve("m", version)
                await plane.execute(servable, x, servable.signature.group_of(x), None, client=client)

            await ask("a", "1")
            await ask("a", "2")
            with pytest.raises(QuotaExceeded):
                await ask("a", "1")
            await ask("b", "1")
            for _ in range(10):
                await ask("", "1")  # the server's own requests

    run(scenario())


def test_refused_requests_take_no_place_in_the_queue() -> None:
    model = doubler()
    with serving({"m": model}, client_rate=0.1, client_burst=1) as running:
        for _ in range(5):
            running.infer("m", BODY)
        assert sum(model.batches) == 1
        assert running.registry.resolve("m").in_flight == 0


@pytest.mark.parametrize(
    ("address", "client"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("2001:db8:1:2::9", "2001:db8:1:2::/64"),
        ("2001:db8:1:3::9", "2001:db8:1:3::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("", ""),
        ("no:address", "no:address"),
    ],
)
def test_all_ipv6_addresses_of_a_network_are_one_client(address: str, client: str) -> None:
    assert client_of(address) == client


@pytest.mark.parametrize("rate", [None, 0.5])
def test_a_key_may_have_a_quota_of_its_own(tmp_path: Path, rate: float | None) -> None:
    """The key may have a larger or a smaller quota than others; other keys get the server's quota, if it has one."""
    keys = tmp_path / "keys.json"
    own, other = (new_key(keys, Scope) for _ in range(2))
    entries = read_keys(keys).keys
    write_keys(keys, [replace(key, rate=0.5, burst=4) if key.id in own else key for key in entries.values()])
    with service(tmp_path / "repo", keys_file=keys, client_rate=rate, client_burst=rate and 2) as running:
        assert call(running, "POST", "/api/v1/models/m/versions", own, content=toy(2.0)).status_code == 201

        def statuses(key: str) -> list[int]:
            return [call(running, "POST", "/v2/models/m/infer", key, json=BODY).status_code for _ in range(5)]

        assert statuses(own) == [200] * 4 + [429]
        assert statuses(other) == ([200] * 5 if rate is None else [200] * 2 + [429] * 3)


def test_what_was_not_known_in_advance_is_owed() -> None:
    quotas = Quotas(Quota(rate=2, burst=4), unit="tokens")
    quotas.take("a", 3, 100.0)
    quotas.spend("a", 7, 100.0)
    with pytest.raises(QuotaExceeded, match="2 tokens per second and client, 4 at once") as raised:
        quotas.take("a", 0, 100.0)
    assert raised.value.retry_after == pytest.approx(3)
    quotas.take("a", 0, 103.01)
    with pytest.raises(QuotaExceeded):
        quotas.take("a", 1, 103.01)
    quotas.take("b", 4, 100.0)


@pytest.mark.parametrize("prefix", ["", "token_"])
@pytest.mark.parametrize(
    "entry", [{"rate": 0}, {"rate": 1e-300}, {"rate": "1"}, {"burst": 3}, {"rate": 1, "burst": 0.5}]
)
def test_a_file_with_an_invalid_quota_is_refused(tmp_path: Path, entry: dict[str, object], prefix: str) -> None:
    keys = tmp_path / "keys.json"
    new_key(keys, Scope)
    document = json.loads(keys.read_bytes())
    document["keys"][0] |= {prefix + name: each for name, each in ({"rate": None, "burst": None} | entry).items()}
    keys.write_text(json.dumps(document))
    with pytest.raises(DamagedKeys, match=f"expected a {prefix}rate from 1e-06"):
        read_keys(keys)


def test_a_file_without_quotas_is_read(tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    new_key(keys, Scope)
    document = json.loads(keys.read_bytes())
    for name in ("rate", "burst", "token_rate", "token_burst"):
        del document["keys"][0][name]
    keys.write_text(json.dumps(document))
    assert [(key.quota, key.token_quota) for key in read_keys(keys).keys.values()] == [(None, None)]
