"""How commands reach a server: keys, certificates, and their errors when no Lathe server answers."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from lathe.server.access.keys import make_key, write_keys
from lathe.server.access.scopes import Scope
from lathe.server.client import ApiError, Client
from tests.server.cli.running import PROJECT, run_lathe
from tests.server.fakes import doubler
from tests.server.running import serving
from tests.server.service import service

TLS = Path(__file__).parents[1] / "access" / "tls"
SERVER = {"tls_cert": TLS / "server.pem", "tls_key": TLS / "server.key"}
CLIENT = ("--cert", str(TLS / "client.pem"), "--cert-key", str(TLS / "client.key"))


def error_line(*arguments: str, **env: str) -> str:
    """Run a command that fails; return its error line without `error: `."""
    said = run_lathe(*arguments, fails=True, env=env)
    assert said.startswith("error: ") and said.count("\n") == 1, said
    return said.removeprefix("error: ").rstrip("\n")


def test_a_key_is_given_by_option_or_variable(tmp_path: Path) -> None:
    key, shown = make_key("bot", Scope, ["*"], 1_800_000_000, None)
    write_keys(tmp_path / "keys.json", [key])
    with service(tmp_path / "repo", keys_file=tmp_path / "keys.json") as running:
        needs_key = "the server requires an API key or a token: --api-key, LATHE_KEY"
        assert error_line("models", "--url", running.url) == needs_key
        assert "model" in run_lathe("models", "--url", running.url, "--api-key", shown)
        assert "model" in run_lathe("models", env={"LATHE_URL": running.url, "LATHE_KEY": shown})
        wrong = error_line("models", "--url", running.url, "--api-key", "lathe_guess")
        assert wrong == "the server does not know the API key or token, or it has expired: --api-key, LATHE_KEY"
        with Client(running.url) as client, pytest.raises(ApiError, match=r"token: api_key=, LATHE_KEY$"):
            client.models()
        answer = httpx.get(f"{running.url}/api/v1/models").json()
        assert answer["error"] == "header authorization: expected 'Bearer' and an API key or a token"


def test_a_certificate_authority_is_given_by_option_or_variable() -> None:
    with serving({"m": doubler()}, **SERVER) as running:
        url = f"https://127.0.0.1:{running.port}"
        untrusted = error_line("infer", "m", "--url", url)
        assert untrusted.startswith(f"{url}: the server's certificate is not trusted (")
        assert untrusted.endswith(": --ca, LATHE_CA")
        assert "answered by m version 1" in run_lathe("infer", "m", "--url", url, "--ca", str(TLS / "ca.pem"))
        assert "answered by m" in run_lathe("infer", "m", env={"LATHE_URL": url, "LATHE_CA": str(TLS / "ca.pem")})
        plain = error_line("infer", "m", "--url", url.replace("https", "http"))
        assert plain.endswith(" closed the connection without an answer; does it expect https://?")


def test_a_certificate_for_other_names_is_explained() -> None:
    with serving({"m": doubler()}, **SERVER) as running:
        other = f"https://0.0.0.0:{running.port}"  # on Linux the loopback address by another name
        said = error_line("infer", "m", "--url", other, "--ca", str(TLS / "ca.pem"))
    assert said == (
        f"{other}: the server's certificate is for other names than 0.0.0.0; "
        "call the server by a name in its certificate"
    )


def test_the_certificate_for_tests_is_valid_for_the_addresses_that_lathe_prints() -> None:
    shown = run_lathe("serve", "--help")
    page = (PROJECT / "docs" / "command-line.md").read_text()
    for text in (shown, page):
        assert "-addext subjectAltName=DNS:localhost,IP:127.0.0.1 " in text


def test_a_client_certificate_is_sent_to_a_server_that_requires_it() -> None:
    with serving({"m": doubler()}, **SERVER, tls_client_ca=TLS / "ca.pem") as running:
        asked = ("infer", "m", "--url", f"https://127.0.0.1:{running.port}", "--ca", str(TLS / "ca.pem"))
        assert "--cert, LATHE_CERT" in error_line(*asked)
        assert "answered by m version 1" in run_lathe(*asked, *CLIENT)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--ca", "none.pem"), "--ca none.pem: No such file or directory"),
        (("--cert", "none.pem"), "--cert none.pem: No such file or directory"),
        (("--ca", str(TLS / "server.key")), f"--ca {TLS / 'server.key'}: expected certificates in PEM"),
        (("--cert-key", "none.pem"), "--cert-key: expected --cert with it"),
        (("--url", "127.0.0.1:8080"), "--url '127.0.0.1:8080': expected an address such as http://127.0.0.1:8080"),
        (("--url", "ftp://x"), "--url 'ftp://x': expected an address such as http://127.0.0.1:8080"),
        (("--url", "http://x:port"), "--url 'http://x:port': expected an address such as http://127.0.0.1:8080"),
        (("--url", "http://"), "--url 'http://': expected an address such as http://127.0.0.1:8080"),
    ],
)
def test_a_wrong_option_is_named_in_the_error(options: tuple[str, ...], expected: str) -> None:
    assert error_line("models", *options).startswith(expected)


def test_the_error_names_the_server_that_does_not_answer_and_what_to_do() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        expected = f"no server answers at {url}: start one (lathe serve), or name another (--url, LATHE_URL)"
        assert error_line("models", "--url", url) == error_line("top", LATHE_URL=url) == expected


def test_another_kind_of_server_is_recognised() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        answering = threading.Thread(target=answer_all, args=(listener, b"SSH-2.0-OpenSSH_9.2\r\n"))
        answering.start()
        said = error_line("models", "--url", f"http://127.0.0.1:{listener.getsockname()[1]}")
        listener.shutdown(socket.SHUT_RDWR)  # ends `accept`
        answering.join()
    assert said.startswith("the server at http://127.0.0.1:")
    assert "in time" not in said  # the client does not wait until its patience ends


def answer_all(listener: socket.socket, text: bytes) -> None:
    with suppress(OSError):
        while True:
            connection, _ = listener.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(text)


def test_https_to_a_server_without_tls_is_explained(tmp_path: Path) -> None:
    with service(tmp_path / "repo") as running:
        url = running.url.replace("http://", "https://")
        assert (
            error_line("models", "--url", url) == f"{url}: the server does not use TLS; use http:// instead of https://"
        )
