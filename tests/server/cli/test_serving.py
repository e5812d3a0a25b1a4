"""How `lathe serve` refuses to start, in one line, and what `lathe status` and `lathe health` say about a server."""

from __future__ import annotations

import json
import re
import socket
from pathlib import Path

import pytest

from lathe.server.environment import BadSettings, read_settings, unknown_variables
from lathe.server.preflight import check_address
from lathe.server.settings import Settings
from tests.server.cli.running import lathe_process, run_lathe
from tests.server.fakes import doubler
from tests.server.repository.world import toy
from tests.server.running import free_port, serving
from tests.server.service import service

TLS = Path(__file__).parents[1] / "access" / "tls"
SERVER = {"tls_cert": TLS / "server.pem", "tls_key": TLS / "server.key"}


def start_error(*options: str, **env: str) -> str:
    """Start a server that does not start; return its error line."""
    said = run_lathe("serve", *options, env=env, fails=True)
    assert said.startswith("error: ") and said.count("\n") == 1, said
    return said.removeprefix("error: ").rstrip("\n")


def test_a_port_in_use_is_one_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        said = start_error("--model-repo", str(tmp_path), "--port", str(port))
        assert said.startswith(f"port {port} of 127.0.0.1 is in use; choose another one (--port, LATHE_PORT)")
        said = start_error("--model-repo", str(tmp_path), "--port", "0", "--grpc-port", str(port))
        assert said.startswith(f"port {port} of 127.0.0.1 is in use; choose another one (--grpc-port, LATHE_GRPC_PORT)")


def test_a_port_that_a_server_just_closed_can_be_used(tmp_path: Path) -> None:
    """Connections of the previous server in TIME_WAIT do not block the port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
        with socket.create_connection(address), listener.accept()[0] as accepted:
            accepted.shutdown(socket.SHUT_RDWR)
    check_address(address[0], address[1], "--port")


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({"LATHE_TLS_CERT": "none.pem"}, "LATHE_TLS_CERT: none.pem: No such file or directory"),
        (
            {"LATHE_TLS_CERT": str(TLS / "server.pem"), "LATHE_TLS_KEY": "none.key"},
            "LATHE_TLS_KEY: none.key: No such file or directory",
        ),
        (
            {"LATHE_TLS_CERT": str(TLS / "server.pem"), "LATHE_TLS_KEY": str(TLS / "client.key")},
            f"LATHE_TLS_CERT, LATHE_TLS_KEY: {TLS}/server.pem, {TLS}/client.key: "
            "the key does not match the certificate",
        ),
        (
            {"LATHE_TLS_CERT": str(TLS / "server.pem")},
            f"LATHE_TLS_CERT, LATHE_TLS_KEY: {TLS}/server.pem, {TLS}/server.pem: no certificate and key in PEM",
        ),
        (
            {**{f"LATHE_{k.upper()}": str(v) for k, v in SERVER.items()}, "LATHE_TLS_CLIENT_CA": str(TLS / "ca.key")},
            f"LATHE_TLS_CLIENT_CA: {TLS}/ca.key: No such file or directory",
        ),
        ({"LATHE_HOST": "192.0.2.1"}, "--host 192.0.2.1: this machine has no such address"),
    ],
)
def test_a_missing_requirement_of_a_server_is_one_line(env: dict[str, str], expected: str, tmp_path: Path) -> None:
    assert start_error("--model-repo", str(tmp_path), "--port", "0", **env).startswith(expected)


def test_a_missing_repository_is_one_line(tmp_path: Path) -> None:
    assert start_error("--model-repo", str(tmp_path / "none")).startswith(
        f"model repository {tmp_path}/none: no such folder; create it"
    )


@pytest.mark.parametrize(
    ("variable", "value", "expected"),
    [
        ("LATHE_THREDS", "3", "LATHE_THREDS: there is no such setting, did you mean LATHE_THREADS?"),
        ("lathe_threds", "3", "lathe_threds: there is no such setting, did you mean LATHE_THREADS?"),
        ("LATHE_TLS_CERTIFICATE", "x", "LATHE_TLS_CERTIFICATE: there is no such setting, did you mean LATHE_TLS_CERT?"),
        ("LATHE_ZZZ", "3", "LATHE_ZZZ: there is no such setting"),
        ("LATHE_WORKERS", "x", "LATHE_WORKERS: expected a whole number, got 'x'"),
        ("LATHE_WORKERS", "0", "LATHE_WORKERS: expected at least 1, got '0'"),
        ("LATHE_WORKERS", "65", "LATHE_WORKERS: expected at most 64, got '65'"),
        ("LATHE_HEADER_TIMEOUT", "soon", "LATHE_HEADER_TIMEOUT: expected a number, got 'soon'"),
        ("LATHE_HEADER_TIMEOUT", "0", "LATHE_HEADER_TIMEOUT: expected more than 0, got '0'"),
        ("LATHE_JOB_IDLE", "maybe", "LATHE_JOB_IDLE: expected true or false, got 'maybe'"),
        ("LATHE_LOG_LEVEL", "loud", "LATHE_LOG_LEVEL: expected 'debug', 'info', 'warning' or 'error', got 'loud'"),
        ("LATHE_TLS_KEY", "x", "tls_key and tls_client_ca: expected tls_cert with them, without it there is no TLS"),
        (
            "LATHE_PORT",
            "tcp://10.0.0.1:8080",
            "LATHE_PORT: expected a whole number, got 'tcp://10.0.0.1:8080' (Kubernetes sets it for a Service named "
            "lathe; enableServiceLinks: false turns that off)",
        ),
    ],
)
def test_a_wrong_setting_is_named(variable: str, value: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(BadSettings) as raised:
        read_settings({}, {variable: value})
    assert str(raised.value) == expected


def test_a_wrong_option_is_named() -> None:
    with pytest.raises(BadSettings, match=r"^--device: expected text that matches .*, got 'tpu'$"):
        read_settings({"device": "tpu"}, {})


def test_all_errors_are_reported_at_once() -> None:
    with pytest.raises(BadSettings) as raised:
        read_settings({"port": -1, "threads": 0}, {"LATHE_A": "", "LATHE_B": ""})
    assert len(str(raised.value).splitlines()) == 4


def test_a_server_refuses_an_unknown_setting(tmp_path: Path) -> None:
    said = start_error("--model-repo", str(tmp_path), LATHE_THREDS="3")
    assert said == "LATHE_THREDS: there is no such setting, did you mean LATHE_THREADS?"


def test_a_missing_file_of_keys_is_one_line(tmp_path: Path) -> None:
    """In a process of its own, because the application is already being built when the error occurs."""
    status, said = lathe_process("serve", "--model-repo", str(tmp_path), "--port", "0", "--keys-file", "none.json")
    assert status == 1 and said.startswith("error: keys (none.json)") and said.count("\n") == 1


def test_variables_set_by_kubernetes_are_ignored() -> None:
    """Kubernetes describes Services named `lathe` and `lathe-metrics` to every container."""
    theirs = {
        "LATHE_SERVICE_HOST": "10.0.0.1",
        "LATHE_SERVICE_PORT": "8080",
        "LATHE_SERVICE_PORT_HTTP": "8080",
        "LATHE_PORT_8080_TCP": "tcp://10.0.0.1:8080",
        "LATHE_PORT_8080_TCP_ADDR": "10.0.0.1",
        "LATHE_METRICS_SERVICE_HOST": "10.0.0.2",
        "LATHE_METRICS_PORT": "tcp://10.0.0.2:9090",
        "LATHE_METRICS_PORT_9090_TCP_PROTO": "tcp",
    }
    ours = {f"LATHE_{name.upper()}": "" for name in Settings.model_fields}
    assert unknown_variables({**theirs, **ours, "LATHE_URL": "", "PATH": ""}) == []
    assert unknown_variables({"LATHE_METRICS_PORT": "9090"}) == ["LATHE_METRICS_PORT"]


def test_every_variable_that_the_project_reads_is_known(project: Path) -> None:
    """If some code read a variable that the server does not know, servers would refuse to start with it."""
    read: set[str] = set()
    for folder in ("core", "server", "tools", "loadtest", "deploy"):
        for path in (project / folder).rglob("*"):
            if path.suffix in {".py", ".yml", ".sh"}:
                read |= set(re.findall(r"\bLATHE_[A-Z][A-Z_]*[A-Z]\b", path.read_text()))
    read |= set(re.findall(r"\bLATHE_[A-Z][A-Z_]*[A-Z]\b", (project / "docker-compose.yml").read_text()))
    assert unknown_variables(dict.fromkeys(read - {"LATHE_THREDS"}, "")) == []


def test_status_summarises_the_server(tmp_path: Path) -> None:
    with service(tmp_path / "repo") as running, running.client() as client:
        client.upload("m", toy(2.0))
        lines = [line.strip().split(None, 1) for line in run_lathe("status", "--url", running.url).splitlines()]
        shown = dict(lines)
        assert {"server": running.url, "ready": "yes", "jobs": "none"}.items() <= shown.items()
        assert shown["models"] == "1, of which 1 answer"
        facts = json.loads(run_lathe("status", "--json", "--url", running.url))
        assert (facts["models"], facts["problems"]) == ("1, of which 1 answer", [])


def test_health_succeeds_once_a_server_is_ready(tmp_path: Path) -> None:
    port = str(free_port())
    assert "error: no server answers at" in run_lathe("health", env={"LATHE_PORT": port}, fails=True)
    with service(tmp_path / "repo") as running:
        assert run_lathe("health", "--url", running.url) == f"{running.url} is ready\n"
        here = {"LATHE_HOST": "0.0.0.0", "LATHE_PORT": running.url.rpartition(":")[2]}
        assert run_lathe("health", env=here) == f"{running.url} is ready\n"


@pytest.mark.parametrize("names", ["models.example", "models.example,127.0.0.1", "*", ""])
def test_health_uses_a_host_name_that_the_server_accepts(names: str) -> None:
    with serving({"doubler": doubler()}, served_hosts=names) as running:
        here = {"LATHE_PORT": str(running.port), "LATHE_SERVED_HOSTS": names}
        assert run_lathe("health", env=here) == f"http://127.0.0.1:{running.port} is ready\n"


def test_health_uses_tls_if_the_server_here_does() -> None:
    with serving({"m": doubler()}, **SERVER) as running:
        here = {"LATHE_PORT": str(running.port), "LATHE_TLS_CERT": str(TLS / "server.pem")}
        assert run_lathe("health", env=here) == f"https://127.0.0.1:{running.port} is ready\n"
        other = {**here, "LATHE_TLS_CERT": str(TLS / "client.pem")}
        assert "is not trusted" in run_lathe("health", env=other, fails=True)
    with serving({"m": doubler()}, **SERVER, tls_client_ca=TLS / "ca.pem") as running:
        here = {"LATHE_PORT": str(running.port), "LATHE_TLS_CERT": str(TLS / "server.pem")}
        assert "LATHE_CERT" in run_lathe("health", env=here, fails=True)
        shown = {"LATHE_CERT": str(TLS / "client.pem"), "LATHE_CERT_KEY": str(TLS / "client.key")}
        assert "is ready" in run_lathe("health", env={**here, **shown})
