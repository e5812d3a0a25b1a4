"""What is looked at before a server starts: can it listen there, are its certificates what they should be."""

from __future__ import annotations

import errno
import os
import socket
import ssl

from server.settings import Settings


class NotReady(Exception):
    """Why a server cannot start, in one line."""


def check(settings: Settings) -> None:
    """Raise NotReady if what the settings name is not there, or in use."""
    check_folder(settings)
    check_certificates(settings)
    check_address(settings.host, settings.port, "--port, LATHE_PORT")
    if settings.grpc_port is not None:
        check_address(settings.host, settings.grpc_port, "--grpc-port, LATHE_GRPC_PORT")


def check_folder(settings: Settings) -> None:
    """Raise NotReady if there is no model repository."""
    if not settings.model_repo.is_dir():
        hint = "; name one that exists, or make it (an empty one will do): --model-repo, LATHE_MODEL_REPO"
        raise NotReady(f"model repository {settings.model_repo}: no such folder{hint}")


def check_certificates(settings: Settings) -> None:
    """Raise NotReady if a file of TLS cannot be read, or key and certificate do not belong together."""
    if settings.tls_cert is None:
        return
    for name in ("tls_cert", "tls_key", "tls_client_ca"):
        path = getattr(settings, name)
        if path is not None:
            try:
                path.read_bytes()
            except OSError as error:
                raise NotReady(f"LATHE_{name.upper()}: {path}: {error.strerror}") from error
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(settings.tls_cert, settings.tls_key)
    except (ssl.SSLError, OSError) as error:
        key = settings.tls_key or settings.tls_cert
        why = "the key is for another certificate" if "MISMATCH" in str(error) else "no certificate and key in PEM"
        raise NotReady(f"LATHE_TLS_CERT, LATHE_TLS_KEY: {settings.tls_cert}, {key}: {why}") from error
    if settings.tls_client_ca is not None:
        try:
            context.load_verify_locations(settings.tls_client_ca)
        except (ssl.SSLError, OSError) as error:
            raise NotReady(f"LATHE_TLS_CLIENT_CA: {settings.tls_client_ca}: no certificates in PEM") from error


def check_address(host: str, port: int, named: str) -> None:
    """Raise NotReady if nothing can listen there; ``named``: the settings of the port."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise NotReady(f"--host {host}: {error.strerror or error}") from error
    for family, kind, protocol, _, address in found:
        with socket.socket(family, kind, protocol) as probe:
            if os.name == "posix":
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            try:
                probe.bind(address)
                probe.listen(1)  # two that have only bound an address do not disturb each other
            except OSError as error:
                raise NotReady(_refused(host, port, named, error)) from error


def _refused(host: str, port: int, named: str, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} of {host} is in use; name another ({named}), or end what listens there"
    if error.errno == errno.EACCES:
        return f"port {port} of {host}: this user may not listen there; name one from 1024 on ({named})"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"--host {host}: this machine has no such address"
    return f"port {port} of {host}: {error.strerror}"
