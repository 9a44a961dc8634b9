"""Which addresses a replica that somebody adds at runtime may have. Pure but for `resolved`.

Loopback and private addresses are where replicas are. Refused are those where nobody's engine is and a cloud's
metadata service may be: a gateway that can be told to ask there gives away its machine's credentials (OWASP API7).
A name is looked at twice: when it is added, and each time it is resolved to connect (DNS rebinding).
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from urllib.parse import urlsplit

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

CARRYING_IPV4 = tuple(  # in their last 32 bits
    ipaddress.ip_network(text)
    for text in (
        "64:ff9b::/96",  # NAT64
        "64:ff9b:1::/48",  # NAT64 of one network (RFC 8215)
        "::/96",  # IPv4-compatible, but for :: and ::1
    )
)
METADATA = {  # of clouds that do not keep them link-local
    ipaddress.ip_address(text)
    for text in (
        "100.100.100.200",  # Alibaba
        "192.0.0.192",  # Oracle
        "168.63.129.16",  # Azure
        "fd00:ec2::254",  # AWS
        "fd20:ce::254",  # Google
    )
}


def refusal(address: str) -> str | None:
    """Why a replica may not be at this IP address; None: it may. Something that is no address may not."""
    try:
        plain = _unwrapped(ipaddress.ip_address(address.partition("%")[0]))
    except ValueError:
        return f"{address[:64]} is no IP address"
    if plain.is_link_local or plain in METADATA:
        return f"{plain} is a link-local or metadata address"
    if plain.is_unspecified or plain.is_multicast or (plain.version == 4 and plain.is_reserved):
        return f"{plain} is nobody's own address"
    return None


def _unwrapped(address: Address) -> Address:
    """The IPv4 address inside an IPv6 one, where it stands for one."""
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour
        if inner is not None:
            return inner
        if int(address) > 1 and any(address in network for network in CARRYING_IPV4):
            return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return address


async def url_refusal(url: str) -> str | None:
    """Why a replica may not be at this URL. A name that does not resolve yet is looked at when it does."""
    return next((why for address in await resolved(url) if (why := refusal(address)) is not None), None)


async def resolved(url: str) -> list[str]:
    """The addresses behind the URL's host, as a connection would find them; none where it does not resolve."""
    parts = urlsplit(url)
    try:
        found = await asyncio.get_running_loop().getaddrinfo(parts.hostname, parts.port or 80, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return [str(entry[4][0]) for entry in found]
