"""Whose an address is, where there are no keys to tell clients apart by."""

from __future__ import annotations

from ipaddress import IPv6Address
from urllib.parse import unquote


def client_of(address: str) -> str:
    """Return who calls from this address: of IPv6 its /64, since whoever has one address there has all of it.

    An IPv4 address in IPv6 clothes (RFC 4291, section 2.5.5.2) is that IPv4 address.
    """
    if ":" not in address:
        return address
    try:
        parsed = IPv6Address(address.partition("%")[0])
    except ValueError:
        return address
    mapped = parsed.ipv4_mapped
    return str(mapped) if mapped is not None else f"{IPv6Address(int(parsed) >> 64 << 64)}/64"


def client_of_peer(peer: str) -> str:
    """Return who calls from gRPC's "ipv4:127.0.0.1:53412" or "ipv6:%5B::1%5D:53412"; empty for any other kind."""
    kind, _, rest = unquote(peer).partition(":")
    return client_of(rest.rpartition(":")[0].strip("[]")) if kind in ("ipv4", "ipv6") else ""
