"""Long sessions by precision: bytes of a session, TTFT of its next turn, decode, and how many fit in 4 GiB.

    python -m bench.long_sessions --json [--quick] [--model FOLDER] [--threads N] [--policies full,int8,k8v4,int4]
        [--models real,random] [--lengths 4096,7936] [--long-lengths 8192,16384,32640] [--keep FILE]

A real `turnkeep engine --kv-precision POLICY` process for each policy and model, asked over its own wire. Beside the
real model, whose window ends at 8,192 tokens, a small one of random weights with a window of 32,768. docs/bench.md
says what each figure is. Last line: one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import sys
import tempfile
import time
import urllib.request
from array import array
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

import uvloop

from bench.processes import Running, python, started
from bench.quant_windows import expected_units
from bench.sessions import PATIENCE, find_model
from bench.talk import Answer, Client
from engines.contract import EMPTY_DIGEST, Base, IdsPrompt, chain_digest
from engines.remote.http import Upstream
from engines.remote.turnkeep import TurnkeepEngine

POLICIES = ("full", "int8", "k8v4", "int4")
REPLY, NEW = 32, 64  # tokens of an answer, and that a turn adds
GIB = 1 << 30
SETTLING_S = 120.0
LONG = {  # of the small model; 512 bytes of K/V a token in 16 bits
    "vocab_size": 49152, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64, "max_position_embeddings": 32768,
    "rope_theta": 500000.0, "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Fit:
    """How sessions are counted: of so many tokens each, in a pool of a share of 4 GiB."""

    tokens: int
    share: int  # the pool is 4 GiB over this


@dataclass(frozen=True, slots=True)
class Shape:
    lengths: tuple[int, ...]
    fit: Fit


def random_model(real: Path, folder: Path) -> Path:
    """A model of random weights with the real one's tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**LONG)).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json"):
        if (real / name).is_file():
            shutil.copy(real / name, folder / name)
    return folder


@dataclass(frozen=True, slots=True)
class Engine:
    running: Running
    url: str
    client: Client
    block_size: int

    def health(self) -> dict[str, Any]:
        return self._json("/health")

    def sessions(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self._json("/turnkeep/v1/sessions")["sessions"]
        return found

    def settled(self, units_wanted: int | None = None) -> dict[str, Any]:
        """The pool in `/health` once nothing is being sealed any more, or so many units are."""
        seen, since, until = -1, time.monotonic(), time.monotonic() + SETTLING_S
        still_s = 1.2 if units_wanted is None else 10.0  # it tells anew every half second, on a busy machine later
        while time.monotonic() < until:
            pool = self.health()["pool"]
            units = sum(pool["sealed_units"].values())
            if units == units_wanted and pool["total"]:
                return pool
            if units != seen:
                seen, since = units, time.monotonic()
            elif time.monotonic() - since > still_s and pool["total"]:
                return pool
            time.sleep(0.2)
        raise TimeoutError("the engine went on sealing")

    def _json(self, path: str) -> dict[str, Any]:
        with urllib.request.urlopen(self.url + path, timeout=60) as answer:
            found: dict[str, Any] = json.loads(answer.read())
            return found


@asynccontextmanager
async def engine(model: Path, policy: str, pool_bytes: int, threads: int | None) -> AsyncIterator[Engine]:
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        options = ["--model", str(model), "--port", "0", "--pool-bytes", str(pool_bytes), "--device", "cpu"]
        options += ["--dtype", "float32", "--exit-with-parent", "--kv-precision", policy, "--max-sessions", "100000"]
        options += ["--threads", str(threads)] if threads else []
        command = python("gateway.cli", "engine", *options)
        running = stack.enter_context(started(command, folder=Path(folder), ready='"event":"ready"'))
        ready = json.loads(next(line for line in running.said.splitlines() if '"event":"ready"' in line))
        remote = TurnkeepEngine(Upstream(ready["url"], timeouts=PATIENCE))
        try:
            client = Client(remote, ready["model"], REPLY, running.cpu_s)
            found = Engine(running, ready["url"], client, 0)
            refused = found.health()["kv_refused"]
            if refused:
                raise RuntimeError(f"the model does not bear {refused}")
            yield Engine(running, ready["url"], client, found.health()["block_size"])
        finally:
            await remote.aclose()


async def ask(engine: Engine, name: str, ids: array[int], start: int, base: Base | None, reply: int) -> Answer:
    """`ids` from `start` on, after `base`."""

    async def give() -> bytes:
        return ids.tobytes()

    client = Client(engine.client.engine, engine.client.model, reply, engine.client.cpu_s)
    prompt = IdsPrompt(ids[start:].tobytes(), len(ids), give, name, base)
    return await client.ask(prompt, name=f"{name}-{len(ids)}", salt="bench")


async def one_session(model: Path, policy: str, lengths: Sequence[int], threads: int | None) -> list[dict[str, Any]]:
    """A session of each length: what it takes, and what its next turn costs."""
    told = []
    for length in lengths:
        chance = Random(length)
        ids = array("I", [chance.randrange(3, 49_000) for _ in range(length)])
        async with engine(model, policy, 3 * GIB, threads) as found:
            fresh = await asyncio.to_thread(found.settled)
            per_token = fresh["bytes"] / fresh["total"] / found.block_size  # float32
            first = await ask(found, "s", ids, 0, None, 2)
            parked = await asyncio.to_thread(found.settled, expected_units(length + 2) if policy != "full" else 0)
            units = sum(parked["sealed_units"].values())
            whole = length + 2  # with the two that it generated
            held = parked["sealed_bytes"] + (whole - units * 64) * per_token
            in_16_bits = parked["sealed_bytes"] + (whole - units * 64) * per_token / 2
            digest = chain_digest(chain_digest(EMPTY_DIGEST, ids.tobytes()), array("I", first.ids).tobytes())
            path = ids + array("I", first.ids)
            base = Base(len(path), digest)
            path.extend(chance.randrange(3, 49_000) for _ in range(NEW))
            then = await ask(found, "s", path, base.length, base, REPLY)
            told.append(
                {
                    "tokens": length,
                    "bytes": round(held),
                    "bytes_16_bit": round(in_16_bits),
                    "ratio": round(held / (whole * per_token / 2), 4),
                    "ratio_16_bit": round(in_16_bits / (whole * per_token / 2), 4),
                    "sealed_units": units,
                    "cached_tokens": then.cached_tokens,
                    "prefill_ms": round(first.ttft_s * 1000),
                    "prefill_cpu_s": round(first.cpu_s, 2),
                    "ttft_ms": round(then.ttft_s * 1000),
                    "ttft_cpu_s": round(then.cpu_s, 2),
                    "decode_ms_token": round(then.decode_s / (REPLY - 1) * 1000, 1),
                }
            )
        _say(f"{policy}: {told[-1]}")
    return told


async def count(model: Path, policy: str, fit: Fit, threads: int | None) -> dict[str, Any]:
    """Sessions one after the other until the first of them has lost a block."""
    ids_of = Random(1)
    async with engine(model, policy, 4 * GIB // fit.share, threads) as found:
        number, each = 0, expected_units(fit.tokens + 1) if policy != "full" else 0
        while True:
            ids = array("I", [ids_of.randrange(3, 49_000) for _ in range(fit.tokens)])
            await ask(found, f"s{number}", ids, 0, None, 2)
            await asyncio.to_thread(found.settled, each * (number + 1))
            kept = {one["session"]: one["blocks"] for one in await asyncio.to_thread(found.sessions)}
            whole = -(-fit.tokens // found.block_size)
            if any(blocks < whole for blocks in kept.values()) or len(kept) < number + 1:
                break
            number += 1
        pool = await asyncio.to_thread(found.settled)
    _say(f"{policy}: {number} sessions of {fit.tokens} tokens in {4 * GIB // fit.share >> 20} MiB")
    return {"tokens": fit.tokens, "counted": number, "in_4_gib": number * fit.share, "scaled_by": fit.share,
            "pool": pool}  # fmt: skip


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print only the JSON object on standard output")
    parser.add_argument("--model", help="a model folder; default: $TURNKEEP_MODEL_DIR, else the demonstration model")
    parser.add_argument("--threads", type=int, help="CPU threads of the model; default: torch's choice")
    parser.add_argument("--policies", default=",".join(POLICIES), help="of the engine; default full,int8,k8v4,int4")
    parser.add_argument("--lengths", default="4096,7936", help="tokens of the real model's sessions")
    parser.add_argument("--long-lengths", default="8192,16384,32640", help="tokens of the random model's sessions")
    parser.add_argument("--models", default="real,random", help="which of the two; default both")
    parser.add_argument("--keep", type=Path, help="file of what was measured; a run goes on from what it holds")
    parser.add_argument("--quick", action="store_true", help="short sessions, small pools: shows that it runs")
    args = parser.parse_args()
    policies = args.policies.split(",")
    real = find_model(args.model)
    shapes: Mapping[str, Shape] = {
        "real": Shape(_numbers(args.lengths), Fit(1024, 32)),
        "random": Shape(_numbers(args.long_lengths), Fit(8192, 128)),
    }
    if args.quick:
        shapes = {"real": Shape((512,), Fit(256, 128)), "random": Shape((1024,), Fit(1024, 512))}
    asked = {name: asdict(shape) for name, shape in shapes.items()}
    if unknown := [name for name in args.models.split(",") if name not in shapes]:
        parser.error(f"no model {', '.join(unknown)}: there are {', '.join(shapes)}")
    shapes = {name: shapes[name] for name in args.models.split(",")}
    kept: dict[str, Any] = {"shapes": json.loads(json.dumps(asked))}
    if args.keep is not None and args.keep.exists():
        kept = json.loads(args.keep.read_text())
        if kept["shapes"] != json.loads(json.dumps(asked)):
            parser.error(f"{args.keep} holds another measurement: {kept['shapes']}")
    told: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, shape in shapes.items():
            model = real if name == "real" else random_model(real, Path(folder) / "long-random")
            told[name] = {"window": 8192 if name == "real" else LONG["max_position_embeddings"]}
            for policy in policies:
                for what, work in (
                    ("sessions", lambda m=model, p=policy, s=shape: one_session(m, p, s.lengths, args.threads)),
                    ("fit", lambda m=model, p=policy, s=shape: count(m, p, s.fit, args.threads)),
                ):
                    piece = f"{name} {policy} {what}"
                    if piece not in kept:
                        kept[piece] = uvloop.run(work())
                        if args.keep is not None:
                            args.keep.write_text(json.dumps(kept, indent=1) + "\n")
                    told[name].setdefault(policy, {})[what] = kept[piece]
            if "full" in policies:
                fit = told[name]["full"]["fit"]["counted"]
                for policy in policies:
                    told[name][policy]["sessions_over_full"] = round(told[name][policy]["fit"]["counted"] / fit, 2)
    told["machine"] = {
        "cores": os.cpu_count(),
        "threads": args.threads,
        "load_average_at_end": round(os.getloadavg()[0], 2),
    }
    if not args.json:
        print("Long sessions by precision")
    print(json.dumps(told))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(word) for word in text.split(",") if word)


if __name__ == "__main__":
    main()
