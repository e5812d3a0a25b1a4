"""Whose an address is, where there are no keys to tell clients apart by."""

from __future__ import annotations

from ipaddress import IPv6Address
from urllib.parse import unquote


def client_of(address: str) -> str:
    """Return who calls from this address: of IPv6 its /64, since whoever has one address there has all of it.

    An IPv4 address in IPv6 clothes (RFC 4291, section 2.5.5.2) is that IPv4 address.
    """
    found = plain_address(address)
    try:
        return f"{IPv6Address(int(IPv6Address(found)) >> 64 << 64)}/64" if ":" in found else found
    except ValueError:
        return found


def plain_address(address: str) -> str:
    """Return an address in the one way it is written here: without a zone, IPv4 without IPv6 clothes."""
    if ":" not in address:
        return address
    try:
        parsed = IPv6Address(address.partition("%")[0])
    except ValueError:
        return address
    return str(parsed.ipv4_mapped or parsed)


def address_of_peer(peer: str) -> tuple[str, int] | None:
    """Return the address and port of gRPC's "ipv4:127.0.0.1:53412" or "ipv6:%5B::1%5D:53412"; None of others."""
    kind, _, rest = unquote(peer).partition(":")
    address, _, port = rest.rpartition(":")
    return (plain_address(address.strip("[]")), int(port)) if kind in ("ipv4", "ipv6") else None


def client_of_peer(peer: str) -> str:
    """Return who calls from there; empty for what has no address."""
    found = address_of_peer(peer)
    return client_of(found[0]) if found is not None else ""
