"""The engine beside its peers, one run, one machine, one model: decode, a ten-turn session, eight and twenty sessions.

    python -m bench.engine --json [--quick] [--rows decode,ten,eight,twenty] [--model FOLDER] [--threads N]
                           [--openvino PYTHON] [--gguf FILE] [--llamacpp PATH] [--vllm URL] [--no-peers]

What is asked lies in bench/engine_workload.json. Every engine is another process, arrivals are stamped here. One
request at a time is asked of all engines in turn; many sessions of one engine after the other. A peer that is missing
has no figure, `missing` has the reason. docs/bench.md says what each figure is. Last line: one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from array import array
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from random import Random
from typing import Any

from bench.engine_peers import (
    Peer,
    Room,
    has_module,
    lines_peer,
    llamacpp_peer,
    this_interpreter,
    turnkeep_peer,
    vllm_peer,
)
from bench.sessions import find_model
from bench.talk import Answer, Asker, Talk, ask_without_reuse, given
from engines.contract import IdsPrompt
from engines.local.model_process import WAIT_POLICY
from gateway.sessions.tokens import ModelTokens

WORKLOAD = Path(__file__).with_name("engine_workload.json")
ROWS = ("decode", "ten", "eight", "twenty")
HOST_BYTES = 2 << 30
OURS, GUESSING, NO_REUSE = "turnkeep", "turnkeep_guessing", "turnkeep_no_reuse"
Figures = dict[str, Any]


def quick(work: dict[str, Any]) -> dict[str, Any]:
    """Shows that it runs: few, short turns."""
    few: dict[str, Any] = {name: dict(work[name]) for name in ROWS}
    few["decode"] |= {"contexts": [128], "reply_tokens": 12, "rounds": 1}
    few["ten"] |= {"turns": 3, "reply_tokens": 8}
    for name, sessions in (("eight", 3), ("twenty", 4)):
        cut = [entry | {"think_s": [0.5], "arrives_s": 0.3 * n} for n, entry in enumerate(work[name]["sessions"])]
        few[name] |= {"sessions": cut[:sessions], "reply_tokens": 8}
    return few


# ---------------------------------------------------------------------- one request after another
async def decode(peers: Sequence[Peer], work: dict[str, Any], vocab: int, model: Path, threads: int | None) -> Figures:
    """Tokens a second after the first one, by context: the median of the rounds; everybody in turn in each."""
    speeds: dict[str, dict[int, list[float]]] = {}
    async with AsyncExitStack() as stack:
        askers = {
            peer.name: (await stack.enter_async_context(peer.start(Room())))(work["reply_tokens"]) for peer in peers
        }
        references = _references(model, threads, "sdpa", "eager")
        for round_ in range(work["rounds"]):
            for context in work["contexts"]:
                draw = Random(round_ * 10_000 + context)
                ids = [draw.randrange(vocab // 4, vocab // 2) for _ in range(context)]
                for name, asker in askers.items():
                    whole = array("I", ids).tobytes()
                    prompt = IdsPrompt(whole, len(ids), given(whole))
                    answer = await asker.ask(prompt, name=f"decode-{round_}-{context}", salt="decode")
                    _note(speeds, name, context, (len(answer.ids) - 1) / answer.decode_s)
                for name, reference in references.items():
                    reference.forget()
                    made = reference.kept(ids, work["reply_tokens"])
                    _note(speeds, name, context, (len(made.ids) - 1) / made.decode_s)
                    reference.forget()
    middle = {name: {str(c): statistics.median(seen) for c, seen in found.items()} for name, found in speeds.items()}
    ours = middle[OURS]
    eager = middle.get("transformers_eager")
    return {
        "tokens_s": {name: {c: round(v, 1) for c, v in found.items()} for name, found in middle.items()},
        "over": {n: {c: round(ours[c] / v, 2) for c, v in f.items()} for n, f in middle.items() if n != OURS},
        "over_transformers_eager": {c: round(ours[c] / eager[c], 2) for c in ours} if eager else None,
    }


def _note(speeds: dict[str, dict[int, list[float]]], name: str, context: int, speed: float) -> None:
    speeds.setdefault(name, {}).setdefault(context, []).append(speed)
    _say(f"decode at {context}: {name} {speed:.1f} tokens/s")


def _references(model: Path, threads: int | None, *kinds: str) -> dict[str, Any]:
    """transformers in this process, by its attention; a DynamicCache each."""
    os.environ.setdefault("OMP_WAIT_POLICY", WAIT_POLICY)
    from bench.reference import Reference

    return {f"transformers_{kind}": Reference(model, threads, attention=kind) for kind in kinds}


async def ten(
    peers: Sequence[Peer], work: dict[str, Any], tokens: ModelTokens, model: Path, threads: int | None
) -> Figures:
    """TTFT of every turn: each engine in its own copy of one conversation, turn by turn in changing order."""
    seen: dict[str, list[float]] = {}
    cached: list[float] = []

    def talk(name: str) -> Talk:
        return Talk(tokens, f"ten-{name}", f"ten-{name}", Random(1), work["system_tokens"], work["user_tokens"])

    async with AsyncExitStack() as stack:
        askers: dict[str, Asker] = {}
        for peer in peers:
            askers[peer.name] = (await stack.enter_async_context(peer.start(Room())))(work["reply_tokens"])
        talks = {name: talk(name) for name in askers}
        reference = _references(model, threads, "sdpa")["transformers_sdpa"]
        for turn in range(1, work["turns"] + 1):
            prompts = {name: one.next_prompt() for name, one in talks.items()}
            names = list(askers)
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                answer = await talks[name].ask(askers[name])
                seen.setdefault(name, []).append(answer.ttft_s)
                if name == OURS:
                    cached.append((answer.cached_tokens or 0) / answer.prompt_tokens)
            plain = await ask_without_reuse(askers[OURS], prompts[OURS], name=f"off-{turn}")
            seen.setdefault(NO_REUSE, []).append(plain.ttft_s)
            seen.setdefault("transformers_new_cache", []).append(reference.fresh(prompts[OURS]).ttft_s)
            kept = reference.kept(prompts[OURS], work["reply_tokens"])
            seen.setdefault("transformers_kept_cache", []).append(kept.ttft_s)
            _say(f"turn {turn}: " + ", ".join(f"{name} {values[-1] * 1000:.0f} ms" for name, values in seen.items()))
    last = {name: values[-1] for name, values in seen.items()}
    return {
        "ttft_ms": {name: [round(value * 1000) for value in values] for name, values in seen.items()},
        "last_turn_over": {name: round(value / last[OURS], 2) for name, value in last.items() if name != OURS},
        "cached_ratio": [round(value, 3) for value in cached],
    }


# ---------------------------------------------------------------------- many sessions
async def crowd(peers: Sequence[Peer], work: dict[str, Any], tokens: ModelTokens) -> Figures:
    """Sessions that come and think as the workload says, on one engine after the other."""
    found: Figures = {}
    for peer in peers:
        room = Room(work["room_tokens"], HOST_BYTES if work["room_tokens"] else None)
        async with peer.start(room) as made:
            asker = made(work["reply_tokens"])
            start = time.perf_counter()
            answers = await asyncio.gather(
                *(_session(asker, tokens, work, number, start) for number in range(len(work["sessions"])))
            )
        found[peer.name] = _crowd_figures(answers)
        _say(f"{len(work['sessions'])} sessions on {peer.name}: {json.dumps(found[peer.name])}")
    return {"engines": found, "ideal_hit": _ideal(work), "system_prompt_alone_hit": _ideal(work, alone=True)}


async def _session(asker: Asker, tokens: ModelTokens, work: dict[str, Any], number: int, start: float) -> list[Answer]:
    entry = work["sessions"][number]
    system = _system(tokens, work["system_tokens"]) if work["shared_system"] else None
    talk = Talk(
        tokens, f"s{number}", "crowd", Random(500 + number), work["system_tokens"], work["user_tokens"], system=system
    )
    talk.next_prompt()
    await asyncio.sleep(start + entry["arrives_s"] - time.perf_counter())
    answers = [await talk.ask(asker)]
    for think_s in entry["think_s"]:
        talk.next_prompt()
        await asyncio.sleep(answers[-1].arrivals_s[-1] + think_s - time.perf_counter())
        answers.append(await talk.ask(asker))
    return answers


def _system(tokens: ModelTokens, wanted: int) -> str:
    """A text of about `wanted` tokens with the template's markup; the user's message makes up the rest."""
    words = Random(7)
    text = "You answer questions."
    while len(tokens.render([{"role": "system", "content": f"{text} {'about ' * 4}"}])) // 4 < wanted - 4:
        text += " " + words.choice(("rivers", "bread", "chess", "the moon", "glass", "honest", "short", "plain"))
    return text


def _crowd_figures(answers: Sequence[Sequence[Answer]]) -> Figures:
    every = [answer for one in answers for answer in one]
    later = [answer for one in answers for answer in one[1:]]
    wall = max(answer.arrivals_s[-1] for answer in every) - min(answer.asked_s for answer in every)
    told = all(answer.cached_tokens is not None for answer in every)
    return {
        "tokens_s": round(sum(len(answer.ids) for answer in every) / wall, 1),
        "ttft_p50_ms": _quantile(every, 0.5),
        "ttft_p95_ms": _quantile(every, 0.95),
        "ttft_later_turns_p50_ms": _quantile(later, 0.5),
        "hit": round(sum(a.cached_tokens or 0 for a in every) / sum(a.prompt_tokens for a in every), 4)
        if told
        else None,
    }


def _quantile(answers: Sequence[Answer], at: float) -> int:
    values = sorted(answer.ttft_s for answer in answers)
    return round(values[min(int(at * len(values)), len(values) - 1)] * 1000)


def _ideal(work: dict[str, Any], *, alone: bool = False) -> float:
    """Share of prompt tokens that could be reused at best; `alone`: only the system prompt ever is."""
    system, user, reply = work["system_tokens"], work["user_tokens"], work["reply_tokens"]
    prompts, reused = 0, 0
    for number, entry in enumerate(work["sessions"]):
        for turn in range(1, len(entry["think_s"]) + 2):
            prompts += system + turn * user + (turn - 1) * reply
            shared = system if work["shared_system"] and (number or turn > 1) else 0
            reused += shared if turn == 1 or alone else system + (turn - 1) * (user + reply)
    return round(reused / prompts, 4)


# ---------------------------------------------------------------------- the run
def peers_of(
    args: argparse.Namespace, model: Path, folder: Path, bytes_per_token: int
) -> tuple[list[Peer], dict[str, str]]:
    """Who is asked, ours first, and who is missing, with the reason."""
    peers = [turnkeep_peer(OURS, folder, model, args.threads, bytes_per_token)]
    if args.no_peers:
        return peers, dict.fromkeys(("transformers_batching", "openvino", "llamacpp", "vllm"), "--no-peers")
    missing: dict[str, str] = {}
    peers.append(lines_peer("transformers_batching", this_interpreter(), "transformers", model, args.threads))
    interpreter = args.openvino or this_interpreter()
    if not has_module(interpreter, "openvino_genai"):
        missing["openvino"] = f"{interpreter} has no openvino_genai (pip install openvino-genai==2026.4.1.0)"
    elif args.gguf is None:
        missing["openvino"] = "no --gguf FILE that it could read"
    else:
        peers.append(lines_peer("openvino", interpreter, "openvino", args.gguf, args.threads))
    if args.llamacpp is None or args.gguf is None:
        missing["llamacpp"] = "no --llamacpp PATH and --gguf FILE"
    else:
        peers.append(llamacpp_peer(args.llamacpp, args.gguf, folder, args.threads, 20))
    if args.vllm is None:
        missing["vllm"] = "no --vllm URL"
    else:
        peers.append(vllm_peer(args.vllm, model.name))
    return peers, missing


async def measure(args: argparse.Namespace) -> Figures:
    work = json.loads(WORKLOAD.read_text())
    work = quick(work) if args.quick else work
    model = find_model(args.model)
    config = json.loads((model / "config.json").read_text())
    tokens = ModelTokens.load(model, name=model.name)
    heads = config.get("num_key_value_heads", config["num_attention_heads"])
    dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    per_token = 2 * 4 * config["num_hidden_layers"] * heads * dim
    result: Figures = dict.fromkeys(ROWS)
    load_at_start = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        peers, missing = peers_of(args, model, Path(folder), per_token)
        plain = [
            turnkeep_peer(OURS, Path(folder), model, args.threads, per_token, "--speculate", "off"),
            turnkeep_peer(GUESSING, Path(folder), model, args.threads, per_token),
        ]
        rows: dict[str, Callable[[], Any]] = {
            "decode": lambda: decode(plain + peers[1:], work["decode"], config["vocab_size"], model, args.threads),
            "ten": lambda: ten(peers, work["ten"], tokens, model, args.threads),
            "eight": lambda: crowd(peers, work["eight"], tokens),
            "twenty": lambda: crowd(peers, work["twenty"], tokens),
        }
        for name in args.rows.split(","):
            result[name] = await rows[name]()
    commands = {peer.name: list(peer.command) for peer in peers}
    return result | {
        "missing": missing,
        "commands": commands | dict.fromkeys(missing),
        "machine": {
            "cores": os.cpu_count(),
            "threads": args.threads,
            "load_average_at_start": round(load_at_start, 2),
            "load_average_at_end": round(os.getloadavg()[0], 2),
        },
    }


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print only the JSON object on standard output")
    parser.add_argument("--quick", action="store_true", help="few, short turns: shows that it runs")
    parser.add_argument("--rows", default=",".join(ROWS), help=f"of {','.join(ROWS)}")
    parser.add_argument("--model", help="a model folder; default: $TURNKEEP_MODEL_DIR, else the demonstration model")
    parser.add_argument("--threads", type=int, help="CPU threads of every engine; default: its own choice")
    parser.add_argument("--openvino", help="a Python that has openvino-genai; default: this one")
    parser.add_argument("--gguf", type=Path, help="the same model as a GGUF file, for OpenVINO and llama.cpp")
    parser.add_argument("--llamacpp", type=Path, help="llama.cpp's llama-server")
    parser.add_argument("--vllm", help="a vLLM server that runs already")
    parser.add_argument("--no-peers", action="store_true", help="ours and transformers' generate only")
    args = parser.parse_args()
    if unknown := set(args.rows.split(",")) - set(ROWS):
        parser.error(f"there is no row {', '.join(sorted(unknown))}")
    result = asyncio.run(measure(args))
    if not args.json:
        print("The engine beside its peers")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
