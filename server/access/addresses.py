"""Identifies clients by their address: for connection limits, the access log, and requests without an API key."""

from __future__ import annotations

from ipaddress import IPv6Address
from urllib.parse import unquote


def client_of(address: str) -> str:
    """Return the client of an address: an IPv4 address itself, an IPv6 address's /64 network, such as `2001:db8::/64`.

    Networks assign whole /64s. An IPv4-mapped IPv6 address (RFC 4291, section 2.5.5.2) counts as that IPv4 address.
    Text that is no address is returned unchanged.
    """
    found = plain_address(address)
    try:
        return f"{IPv6Address(int(IPv6Address(found)) >> 64 << 64)}/64" if ":" in found else found
    except ValueError:
        return found


def plain_address(address: str) -> str:
    """Return an IPv6 address in canonical form, without a zone, and IPv4-mapped IPv6 as IPv4; other text unchanged."""
    if ":" not in address:
        return address
    try:
        parsed = IPv6Address(address.partition("%")[0])
    except ValueError:
        return address
    return str(parsed.ipv4_mapped or parsed)


def parse_peer(peer: str) -> tuple[str, int] | None:
    """Return the address (as `plain_address`) and port of a gRPC peer; None for other peers, such as Unix sockets.

    A peer is text such as "ipv4:127.0.0.1:53412" or "ipv6:%5B::1%5D:53412".
    """
    kind, _, rest = unquote(peer).partition(":")
    address, _, port = rest.rpartition(":")
    return (plain_address(address.strip("[]")), int(port)) if kind in ("ipv4", "ipv6") else None


def client_of_peer(peer: str) -> str:
    """Return the client of a gRPC peer; empty if the peer has no IP address."""
    found = parse_peer(peer)
    return client_of(found[0]) if found is not None else ""
