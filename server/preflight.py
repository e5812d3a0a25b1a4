"""Checks before a server starts: the repository folder, the TLS files, and whether the ports are free."""

from __future__ import annotations

import errno
import os
import socket
import ssl

from lathe.server.settings import Settings


class CannotStart(Exception):
    """The server cannot start; the message says why in one line."""


def check(settings: Settings) -> None:
    """Raise CannotStart if the settings name a folder, file or address that cannot be used."""
    check_folder(settings)
    check_certificates(settings)
    check_address(settings.host, settings.port, "--port, LATHE_PORT")
    if settings.grpc_port is not None:
        check_address(settings.host, settings.grpc_port, "--grpc-port, LATHE_GRPC_PORT")


def check_folder(settings: Settings) -> None:
    """Raise CannotStart if the model repository is no folder."""
    if not os.path.isdir(settings.model_repo):  # unlike `Path.is_dir` no error for a name that is too long
        hint = "; create it (it may be empty) or name another one: --model-repo, LATHE_MODEL_REPO"
        raise CannotStart(f"model repository {settings.model_repo}: no such folder{hint}")


def check_certificates(settings: Settings) -> None:
    """Raise CannotStart if a TLS file cannot be read or is not PEM, or the key does not match the certificate."""
    if settings.tls_cert is None:
        return
    for name in ("tls_cert", "tls_key", "tls_client_ca"):
        path = getattr(settings, name)
        if path is not None:
            try:
                path.read_bytes()
            except OSError as error:
                raise CannotStart(f"LATHE_{name.upper()}: {path}: {error.strerror}") from error
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(settings.tls_cert, settings.tls_key)
    except (ssl.SSLError, OSError) as error:
        key = settings.tls_key or settings.tls_cert
        why = "the key does not match the certificate" if "MISMATCH" in str(error) else "no certificate and key in PEM"
        raise CannotStart(f"LATHE_TLS_CERT, LATHE_TLS_KEY: {settings.tls_cert}, {key}: {why}") from error
    if settings.tls_client_ca is not None:
        try:
            context.load_verify_locations(settings.tls_client_ca)
        except (ssl.SSLError, OSError) as error:
            raise CannotStart(f"LATHE_TLS_CLIENT_CA: {settings.tls_client_ca}: no certificates in PEM") from error


def check_address(host: str, port: int, named: str) -> None:
    """Raise CannotStart if the process cannot listen on the address.

    `named` is text for the error: the names of the settings that set the port.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise CannotStart(f"--host {host}: {error.strerror or error}") from error
    for family, kind, protocol, _, address in found:
        with socket.socket(family, kind, protocol) as probe:
            if os.name == "posix":
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            try:
                probe.bind(address)
                probe.listen(1)  # with SO_REUSEADDR `bind` succeeds on a port in use; `listen` fails
            except OSError as error:
                raise CannotStart(_refused(host, port, named, error)) from error


def _refused(host: str, port: int, named: str, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} of {host} is in use; choose another one ({named}), or stop the process that listens on it"
    if error.errno == errno.EACCES:
        return f"port {port} of {host}: this user may not listen on it; choose one of at least 1024 ({named})"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"--host {host}: this machine has no such address"
    return f"port {port} of {host}: {error.strerror}"
