"""Ready is said only by a gateway that can take a turn."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engines.contract import Capabilities
from engines.echo import EchoEngine
from tests.gateway.live import MODEL, live_gateway

pytestmark = pytest.mark.anyio


class IdsOnly(EchoEngine):
    async def capabilities(self) -> Capabilities:
        return replace(await super().capabilities(), takes_chat=False)


@pytest.mark.parametrize("known", [True, False], ids=["its tokenizer is known", "no tokenizer"])
async def test_a_replica_that_takes_only_ids_is_ready_with_its_tokenizer(tmp_path: Path, known: bool) -> None:
    without: dict[str, Any] = {} if known else {"tokenizers": {}}
    async with live_gateway(tmp_path, {"echo": IdsOnly(model=MODEL)}, **without) as live:
        ready = await live.client.get("/readyz")
        turn = await live.turn(await live.session(), "hello")
        assert (ready.status_code, turn.status_code) == ((200, 200) if known else (503, 503)), ready.text
        assert ready.json()["ready"] is known
        assert ("no tokenizer is loaded" in ready.json()["checks"]["replicas"]) is not known


async def test_no_replica_is_not_ready(tmp_path: Path) -> None:
    async with live_gateway(tmp_path, {}) as live:
        ready = await live.client.get("/readyz")
        assert ready.status_code == 503
        assert ready.json()["checks"] == {"store": "ok", "replicas": "no replica answers"}
