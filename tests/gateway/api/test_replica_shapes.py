"""What is believed of each replica's cache, as the admin API, the dashboard and the command line tell it; how many
may be added."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from engines.echo import EchoEngine
from engines.kv_stream import KvStream
from gateway.commands.replicas import _row
from tests.gateway.live import Live, live_gateway

pytestmark = pytest.mark.anyio
LONG = "a message that is longer than a block of the engine, so that there is something to be found again"


async def shown(live: Live) -> dict[str, dict[str, Any]]:
    return {told["name"]: told for told in (await live.client.get("/admin/v1/replicas")).json()["data"]}


async def test_trust_resident_tokens_and_right_predictions_are_shown(tmp_path: Path) -> None:
    engines = {"tells": EchoEngine(name="tells", kv=KvStream(time.time)), "silent": EchoEngine(name="silent")}
    async with live_gateway(tmp_path, engines) as live:
        for number in range(6):
            session = await live.session(model="echo")
            for _ in range(2):
                await live.turn(session, f"{number} {LONG}")
        told = await shown(live)
        snapshot = (await live.client.get("/admin/v1/snapshot")).json()["replicas"]
        metrics = (await live.client.get("/metrics")).text
        gateway = live.app.state.gateway
        for _ in range(3):
            gateway.fleet.outlook.held["tells"].answered(predicted=500, reported=0, slack=0)
        lied = (await shown(live))["tells"]["cache"]
    tells, silent = told["tells"]["cache"], told["silent"]["cache"]
    assert (tells["trust"], tells["feed"]["state"]) == ("exact", "live")
    assert (silent["trust"], silent["feed"]["state"]) == ("guess", "none")
    assert min(tells["resident_tokens"], silent["resident_tokens"]) > 0
    assert (tells["right_share"], silent["right_share"]) == (1.0, 1.0)
    assert tells["predictions"] + silent["predictions"] >= 6
    assert {one["name"]: one["cache"] for one in snapshot} == {name: one["cache"] for name, one in told.items()}
    assert f'turnkeep_replica_resident_tokens{{replica="tells"}} {float(tells["resident_tokens"])}' in metrics
    assert 'turnkeep_replica_right_ratio{replica="silent"} 1.0' in metrics
    assert (lied["trust"], lied["feed"]["state"], lied["resident_tokens"]) == ("guess", "doubted", 0)
    assert "less cached" in lied["feed"]["problem"]
    row = _row(told["tells"])
    assert row[5:8] == ("exact, feed live", str(tells["resident_tokens"]), f"100% of {tells['predictions']}")


async def test_one_more_than_may_be_added_is_refused_with_the_numbers(tmp_path: Path) -> None:
    async with live_gateway(tmp_path, added_replicas_max=1) as live:
        answers = [
            await live.client.post("/admin/v1/replicas", json={"url": f"http://127.0.0.1:{port}", "name": f"r{port}"})
            for port in (9, 10)
        ]
    assert [answer.status_code for answer in answers] == [201, 409]
    error = answers[1].json()["error"]
    assert (error["code"], error["details"]) == ("too_many_replicas", {"added": 1, "limit": 1})
    assert "remove one, or raise added_replicas_max" in error["message"]
