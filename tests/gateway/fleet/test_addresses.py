"""Where a replica that somebody adds may be: at home, and nowhere that a machine's credentials are given away."""

from __future__ import annotations

import socket

import aiohttp
import pytest

from engines.contract import EngineUnreachable
from engines.remote.http import Upstream
from gateway.fleet.addresses import refusal, url_refusal

REFUSED = (
    "169.254.169.254", "169.254.0.1", "fe80::1", "fe80::1%eth0", "fd00:ec2::254", "fd20:ce::254", "100.100.100.200",
    "192.0.0.192", "168.63.129.16", "0.0.0.0", "::", "224.0.0.1", "ff02::1", "255.255.255.255", "240.0.0.1",
    "::ffff:169.254.169.254", "::ffff:a9fe:a9fe", "64:ff9b::a9fe:a9fe", "64:ff9b:1::a9fe:a9fe", "::169.254.169.254",
    "2002:a9fe:a9fe::1", "nonsense", "",
)  # fmt: skip
TAKEN = (
    "127.0.0.1",
    "::1",
    "10.1.2.3",
    "192.168.0.7",
    "172.16.0.1",
    "fd12:3456::1",
    "8.8.8.8",
    "2001:db8::1",
    "100.64.0.1",
)


@pytest.mark.parametrize("address", REFUSED)
def test_nobodys_engine_is_there(address: str) -> None:
    assert refusal(address) is not None


@pytest.mark.parametrize("address", TAKEN)
def test_engines_are_there(address: str) -> None:
    assert refusal(address) is None


@pytest.mark.anyio
@pytest.mark.parametrize(
    "url",
    [
        "http://169.254.169.254/",
        "http://2852039166",
        "http://0xa9fea9fe",
        "http://0251.0376.0251.0376",
        "http://[::ffff:a9fe:a9fe]:80",
    ],
)
async def test_however_it_is_written(url: str) -> None:
    assert await url_refusal(url) is not None


@pytest.mark.anyio
async def test_a_name_that_leads_elsewhere_later_is_refused_when_it_is_connected_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def rebound(
        self: object, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[dict[str, object]]:
        return [{"hostname": host, "host": "169.254.169.254", "port": port, "family": family, "proto": 0, "flags": 0}]

    monkeypatch.setattr(aiohttp.ThreadedResolver, "resolve", rebound)
    upstream = Upstream("http://engine.example:80", refuse_address=refusal)
    try:
        with pytest.raises(EngineUnreachable, match="link-local or metadata"):
            await upstream.get("/health", timeout_s=2.0)
    finally:
        await upstream.aclose()
