"""HTTP and gRPC over TLS, with and without client certificates."""

from __future__ import annotations

import ssl
from pathlib import Path

import grpc
import httpx
import numpy as np
import pytest
from pydantic import ValidationError

from lathe.server.api.grpc.messages import INFERENCE, message_class
from lathe.server.client import Client, ClientError
from lathe.server.settings import Settings
from tests.server.api.grpc.wire import grpc_serving
from tests.server.client.both_clients import BOTH
from tests.server.fakes import doubler
from tests.server.running import serving

FILES = Path(__file__).parent / "tls"  # certificates of a test authority, valid for a hundred years
SERVER = {"tls_cert": FILES / "server.pem", "tls_key": FILES / "server.key"}


NOT_TRUSTED = r"certificate is not trusted \([a-z -]+\); name the CA .*: ca=, LATHE_CA$"


def trusting(*, showing: bool = False) -> ssl.SSLContext:
    """A client's TLS context that trusts the authority."""
    context = ssl.create_default_context(cafile=FILES / "ca.pem")
    if showing:
        context.load_cert_chain(FILES / "client.pem", FILES / "client.key")
    return context


def test_http_over_tls() -> None:
    with serving({"m": doubler()}, **SERVER) as running:
        with Client(f"https://127.0.0.1:{running.port}", verify=trusting()) as client:
            answer = client.infer("m", {"x": np.ones((1, 4), np.float32)})
            assert answer.outputs["y"].tolist() == [[2.0] * 4]
        with pytest.raises(httpx.ConnectError, match="certificate verify failed"):
            httpx.get(f"https://127.0.0.1:{running.port}/v2")
        with pytest.raises(httpx.HTTPError):
            httpx.get(f"http://127.0.0.1:{running.port}/v2")
        for scheme in ("https", "HTTPS"):
            doubtful = Client(f"{scheme}://127.0.0.1:{running.port}")
            with doubtful, pytest.raises(ClientError, match=NOT_TRUSTED):
                doubtful.ready()


def test_a_client_without_a_required_certificate_is_refused() -> None:
    with serving({"m": doubler()}, **SERVER, tls_client_ca=FILES / "ca.pem") as running:
        url = f"https://127.0.0.1:{running.port}/v2"
        assert httpx.get(url, verify=trusting(showing=True)).status_code == 200
        with pytest.raises(httpx.HTTPError):
            httpx.get(url, verify=trusting())


@pytest.mark.parametrize("kind", BOTH)
def test_a_client_trusts_the_authority_and_sends_its_certificate(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = {"cert": FILES / "client.pem", "cert_key": FILES / "client.key"}
    with serving({"m": doubler()}, **SERVER, tls_client_ca=FILES / "ca.pem") as running:
        url = f"https://127.0.0.1:{running.port}"
        with BOTH[kind](url, ca=FILES / "ca.pem", **mine) as client:
            assert client.infer("m", {"x": np.ones((1, 4), np.float32)}).version == 1
        monkeypatch.setenv("LATHE_CA", str(FILES / "ca.pem"))
        with BOTH[kind](url, **mine) as client:
            assert client.ready()
        with BOTH[kind](url) as client, pytest.raises(ClientError):
            client.ready()
        with pytest.raises(ClientError, match=r"cert .*client\.key: expected a certificate and its private key"):
            BOTH[kind](url, cert=FILES / "client.key")
        with pytest.raises(ClientError, match=r"ca nowhere\.pem: No such file or directory$"):
            BOTH[kind](url, ca="nowhere.pem")
        with pytest.raises(ClientError, match=r"ca .*client\.key: expected certificates in PEM$"):
            BOTH[kind](url, ca=FILES / "client.key")


def live_over_grpc(address: str, credentials: grpc.ChannelCredentials) -> bool:
    request = message_class(INFERENCE.message_types_by_name["ServerLiveRequest"])
    response = message_class(INFERENCE.message_types_by_name["ServerLiveResponse"])
    with grpc.secure_channel(address, credentials) as channel:
        call = channel.unary_unary(
            "/inference.GRPCInferenceService/ServerLive", request.SerializeToString, response.FromString
        )
        return bool(call(request(), timeout=5).live)


def test_grpc_over_tls() -> None:
    authority = (FILES / "ca.pem").read_bytes()
    pair = ((FILES / "client.key").read_bytes(), (FILES / "client.pem").read_bytes())
    with grpc_serving({"m": doubler()}, **SERVER, tls_client_ca=FILES / "ca.pem") as (_, address):
        assert live_over_grpc(address, grpc.ssl_channel_credentials(authority, *pair))
        with pytest.raises(grpc.RpcError, match="UNAVAILABLE"):
            live_over_grpc(address, grpc.ssl_channel_credentials(authority))


def test_one_file_may_hold_certificate_and_key(tmp_path: Path) -> None:
    both = tmp_path / "server.pem"
    both.write_bytes((FILES / "server.pem").read_bytes() + (FILES / "server.key").read_bytes())
    authority = (FILES / "ca.pem").read_bytes()
    with grpc_serving({"m": doubler()}, tls_cert=both) as (running, address):
        assert httpx.get(f"https://127.0.0.1:{running.port}/v2", verify=trusting()).status_code == 200
        assert live_over_grpc(address, grpc.ssl_channel_credentials(authority))


@pytest.mark.parametrize("name", ["tls_key", "tls_client_ca"])
def test_incomplete_tls_settings_are_refused(name: str) -> None:
    with pytest.raises(ValidationError, match="expected tls_cert with them"):
        Settings(**{name: FILES / "ca.pem"})
