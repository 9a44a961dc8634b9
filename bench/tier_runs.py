"""The runs behind `bench.tiers`: sessions on the real model, in the engine core, through its tiers."""

from __future__ import annotations

import random
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from engines.contract import EMPTY_DIGEST, Base, Sampling, chain_digest
from engines.local.config import EngineConfig
from engines.local.engine import LocalEngine
from engines.local.model import LoadedModel, load_model
from engines.local.refusal import Refusal
from engines.local.sequence import CoreRequest

SYSTEM, ASKED, ANSWERED, TURNS = (
    237,
    64,
    48,
    4,
)  # tokens: ideal hit 0.864, system prompt alone 0.505,
ROOM_FOR = 4.5  # sessions that the device pool holds
AT_ONCE = 4  # sequences in a step
NEXT = 32  # tokens of the turn that comes after the pause


@dataclass(slots=True)
class Client:
    """One session, greedy: its path as the gateway knows it."""

    name: str
    path: list[int] = field(default_factory=list)
    digest: bytes = EMPTY_DIGEST
    prompt_tokens: int = 0
    cached_tokens: int = 0
    host_tokens: int = 0

    def request(self, delta: list[int], max_tokens: int) -> CoreRequest:
        base = Base(len(self.path), self.digest) if self.path else None
        sampling = Sampling(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        self._grow(delta)
        return CoreRequest(self.name, array("I", delta).tobytes(), base, self.name, "", 0, sampling)

    def answered(self, ids: list[int]) -> None:
        self._grow(ids)

    def _grow(self, ids: list[int]) -> None:
        self.path += ids
        self.digest = chain_digest(self.digest, array("I", ids).tobytes())


def measure(folder: Path, files: Path, *, threads: int | None, quick: bool, only: str | None) -> dict[str, Any]:
    if threads is not None:
        torch.set_num_threads(threads)
    model = load_model(folder)
    length, sessions = (600, 6) if quick else (4096, 20)
    result: dict[str, Any] = {"model": folder.name, "threads": torch.get_num_threads()}
    if only != "many":
        result["coming_back"] = coming_back(model, files, length)
    if only != "coming_back":
        result["many"] = {how: many(model, sessions, host=how == "host_tier") for how in ("host_tier", "device_only")}
    return result


def _words(model: LoadedModel) -> range:
    """Ids that are no special tokens."""
    return range(min(1000, model.vocab_size // 2), model.vocab_size)


# ------------------------------------------------------------------ one session
def coming_back(model: LoadedModel, files: Path, length: int) -> dict[str, Any]:
    """Seconds to the first token of a turn of NEXT tokens after `length` tokens, by where their K/V is."""
    draw = random.Random(1)
    prompt, more = (draw.choices(_words(model), k=count) for count in (length, NEXT))
    nbytes = (length + 256) * model.kv_bytes_per_token
    config = EngineConfig(pool_bytes=int(1.2 * nbytes), host_bytes=int(1.2 * nbytes), seed=1)
    on_disk = EngineConfig(pool_bytes=int(1.2 * nbytes), host_bytes=int(1.2 * nbytes), kv_dir=str(files), seed=1)
    ttft_s: dict[str, float] = {}
    answers: dict[str, list[int]] = {}
    file_bytes, suspend_s = 0, 0.0

    def turn(how: str, engine: LocalEngine, client: Client) -> None:
        ttft_s[how], answers[how] = timed(engine, client, more)

    def spoken(config: EngineConfig) -> tuple[LocalEngine, Client]:
        engine, client = LocalEngine(model, config, time.monotonic, fingerprint="bench"), Client("s")
        timed(engine, client, prompt)
        return engine, client

    engine, client = spoken(config)
    whole = [*client.path, *more]
    turn("device", engine, client)
    ttft_s["computed"], answers["computed"] = timed(LocalEngine(model, config, time.monotonic), Client("s"), whole)
    engine, client = spoken(config)
    done(engine, lambda: engine.suspension.suspend(1, "s", ""))
    turn("host", engine, client)
    engine, client = spoken(on_disk)
    began_s = time.monotonic()
    file_bytes = done(engine, lambda: engine.suspension.suspend(1, "s", ""))["bytes"]
    suspend_s = time.monotonic() - began_s
    path, digest = list(client.path), client.digest
    turn("disk", engine, client)
    close(engine)
    engine, client = LocalEngine(model, on_disk, time.monotonic, fingerprint="bench"), Client("s", list(path), digest)
    done(engine, lambda: engine.suspension.resume(2, "s", ""))
    turn("disk_resumed", engine, client)
    close(engine)
    engine, client = LocalEngine(model, on_disk, time.monotonic, fingerprint="bench"), Client("s", list(path), digest)
    turn("restarted", engine, client)
    close(engine)
    return {
        "path_tokens": length,
        "turn_tokens": NEXT,
        "ttft_s": {how: round(seconds, 4) for how, seconds in ttft_s.items()},
        "times_faster_than_computed": {
            how: round(ttft_s["computed"] / seconds, 1) for how, seconds in ttft_s.items() if how != "computed"
        },
        "same_answer": all(answer == answers["device"] for answer in answers.values()),
        "suspend_s": round(suspend_s, 4),
        "file_bytes": file_bytes,
    }


def timed(engine: LocalEngine, client: Client, delta: list[int], max_tokens: int = 8) -> tuple[float, list[int]]:
    """One turn -> seconds to its first token, its ids."""
    began_s, first_s = time.monotonic(), 0.0
    engine.submit(client.request(delta, max_tokens))
    ids: list[int] = []
    while engine.has_work():
        for output in engine.step():
            if output.ids and not ids:
                first_s = time.monotonic() - began_s
            ids += output.ids
    client.answered(ids)
    return first_s, ids


def done(engine: LocalEngine, ask: Callable[[], None]) -> dict[str, Any]:
    ask()
    while not (answers := engine.suspension.settled()):
        engine.step()
    (_, answer) = answers[0]
    if isinstance(answer, Refusal):
        raise SystemExit(f"the session could not be put down: {answer.message}")
    while engine.has_work():
        engine.step()
    return answer


def close(engine: LocalEngine) -> None:
    if engine._tiers is not None and engine._tiers.disk is not None:
        engine._tiers.disk.close()


# ------------------------------------------------------------------ many sessions
def many(model: LoadedModel, count: int, *, host: bool) -> dict[str, Any]:
    """`count` sessions of TURNS turns in turn, on device room for ROOM_FOR of them."""
    draw = random.Random(2)
    each = SYSTEM + TURNS * (ASKED + ANSWERED)
    pool = int(ROOM_FOR * each * model.kv_bytes_per_token)
    room = 2 * count * each * model.kv_bytes_per_token if host else 0
    config = EngineConfig(pool_bytes=pool, host_bytes=room, max_running=AT_ONCE, seed=1)
    engine = LocalEngine(model, config, time.monotonic)
    system = draw.choices(_words(model), k=SYSTEM)
    clients = [Client(f"s{number}") for number in range(count)]
    later_s: list[float] = []
    began_s = time.monotonic()
    for turn in range(TURNS):
        order = draw.sample(clients, count)
        for at in range(0, count, AT_ONCE):
            first_s = _turns(engine, order[at : at + AT_ONCE], [] if turn else system, draw)
            later_s += first_s if turn else []
    prompt, cached = (sum(getattr(client, name) for client in clients) for name in ("prompt_tokens", "cached_tokens"))
    ideal = 1 - (SYSTEM + count * TURNS * ASKED) / prompt
    engine.check()
    stats = engine.stats()
    return {
        "sessions": count,
        "turns": TURNS,
        "device_bytes": pool,
        "host_bytes": room,
        "hit": round(cached / prompt, 4),
        "hit_from_host": round(sum(client.host_tokens for client in clients) / prompt, 4),
        "hit_ideal": round(ideal, 4),
        "ttft_later_turns_p50_s": round(sorted(later_s)[len(later_s) // 2], 4),
        "seconds": round(time.monotonic() - began_s, 1),
        "pieces_damaged": stats.pieces_damaged,
    }


def _turns(engine: LocalEngine, clients: list[Client], before: list[int], draw: random.Random) -> list[float]:
    """One turn of each, at the same time -> seconds to the first token of each."""
    began_s, first_s = time.monotonic(), dict[str, float]()
    ids: dict[str, list[int]] = {client.name: [] for client in clients}
    for client in clients:
        asked = draw.choices(_words(engine.model), k=ASKED)
        engine.submit(client.request([*before, *asked], ANSWERED))
    by_name = {client.name: client for client in clients}
    while engine.has_work():
        for output in engine.step():
            if output.ids:
                first_s.setdefault(output.request_id, time.monotonic() - began_s)
            ids[output.request_id] += output.ids
            if output.usage is not None:
                client = by_name[output.request_id]
                client.prompt_tokens += output.usage.prompt_tokens
                client.cached_tokens += output.usage.cached_tokens or 0
                client.host_tokens += output.usage.host_tokens
    for client in clients:
        client.answered(ids[client.name])
    return list(first_s.values())
