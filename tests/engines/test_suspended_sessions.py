"""Suspend, restart, move, on the real model and over HTTP: greedy answers as if nobody had ever stopped."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from engines.contract import EMPTY_DIGEST, Base, chain_digest
from engines.local.checks import u32_bytes
from engines.local.session_doors import CONTENT_TYPE
from tests.engines.running import RunningEngine, running_engine
from tests.engines.test_server_model import answer_of, ids_of

pytestmark = [pytest.mark.model, pytest.mark.prove]
OPTIONS = {"served_name": "small", "pool_bytes": 96 << 20, "threads": 1, "host_bytes": 256 << 20}
TEXT = "<|im_start|>user\nTell me of {} and of what came after it, in plain words.<|im_end|>\n<|im_start|>assistant\n"
SUBJECTS = ("the sea", "a bridge in winter", "the first train", "bread")
AT = "/turnkeep/v1/sessions/s"


class Client:
    def __init__(self) -> None:
        self.path: list[int] = []
        self.digest = EMPTY_DIGEST
        self.cached: list[int] = []

    def say(self, engine: RunningEngine, text: str) -> list[int]:
        delta = ids_of(engine, text)
        base = Base(len(self.path), self.digest) if self.path else None
        status, got = engine.generate(delta, session="s", salt="t", base=base, max_tokens=24)
        assert status == 200, got
        answer = answer_of(got)
        self.cached.append(got[0]["cached_tokens"] - max(len(self.path) - 1, 0))
        for more in (delta, answer):
            self.path += more
            self.digest = chain_digest(self.digest, u32_bytes(more))
        return answer


def spoken(engine: RunningEngine, client: Client, subjects: tuple[str, ...]) -> list[list[int]]:
    return [client.say(engine, TEXT.format(subject)) for subject in subjects]


def post(engine: RunningEngine, path: str, **more: Any) -> dict[str, Any]:
    answer = engine.client.post(path, **more)
    assert answer.status_code == 200, answer.text
    told: dict[str, Any] = answer.json()
    return told


def test_greedy_answers_are_those_of_a_session_that_never_stopped(model_dir: Path, tmp_path: Path) -> None:
    options = OPTIONS | {"model": str(model_dir)}
    with running_engine(options) as engine:
        wanted = spoken(engine, Client(), SUBJECTS)
    client = Client()
    with running_engine(options | {"kv_dir": str(tmp_path / "one")}) as engine:
        got = spoken(engine, client, SUBJECTS[:2])
        assert post(engine, f"{AT}/suspend?salt=t")["tokens"] == len(client.path)
        until_s = time.monotonic() + 10  # what /health tells is up to half a second old
        while engine.client.get("/health").json()["pool"]["cached"]:
            assert time.monotonic() < until_s
            time.sleep(0.1)
    with running_engine(options | {"kv_dir": str(tmp_path / "one")}) as engine:
        got += spoken(engine, client, SUBJECTS[2:3])
        file = engine.client.get(f"{AT}/kv?salt=t")
        assert file.headers["content-type"] == CONTENT_TYPE
    with running_engine(options | {"kv_dir": str(tmp_path / "two")}) as engine:
        moved = engine.client.put(f"{AT}/kv?salt=t", content=file.content, headers={"content-type": CONTENT_TYPE})
        assert moved.json()["tokens"] == len(client.path)
        got += spoken(engine, client, SUBJECTS[3:])
        assert engine.client.get("/health").json()["pool_ok"]
        gone = engine.client.delete(f"{AT}?salt=t")
        assert gone.json()["blocks_freed"] > 0
    assert got == wanted
    assert set(client.cached) == {0}, "something of the path was computed again"
    assert [path.name for path in (tmp_path / "two").iterdir()] == ["lock"]
