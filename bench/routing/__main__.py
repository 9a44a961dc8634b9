"""Where turns land: hits and balance of ours and of the rules that others publish, on a trace of production.

    python -m bench.routing --trace ../shared/data/mooncake/conversation_trace.jsonl --replicas N --json
        [--capacity 5000 --capacity 1000] [--policy NAME ...] [--limit REQUESTS] [--quick] [--plot FILE.svg]

docs/bench.md says what each figure is. Last line: one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from bench.routing import simulate
from bench.routing.policies import POLICIES, REPLAYED
from bench.routing.trace import BLOCK_TOKENS, Asked, load

TRACE = Path(__file__).parents[3] / "shared" / "data" / "mooncake" / "conversation_trace.jsonl"
REPLICAS = (4, 8, 16)
CAPACITIES = (5000, 1000)
QUICK_REQUESTS = 2000


def measure(asked: list[Asked], replicas: list[int], capacities: list[int], policies: list[str]) -> dict[str, Any]:
    rows = []
    for capacity in capacities:
        for size in replicas:
            reachable, infinite = simulate.limits(asked, replicas=size, capacity=capacity)
            for policy in policies:
                began = time.monotonic()
                told = simulate.row(
                    asked, policy, replicas=size, capacity=capacity, reachable=reachable, infinite=infinite
                )
                rows.append(told | {"reachable_blocks": reachable, "seconds": round(time.monotonic() - began, 1)})
                print(f"{capacity} blocks, {size:2} replicas: {json.dumps(rows[-1])}", file=sys.stderr, flush=True)
    ours = [told for told in rows if told["policy"] == "ours"]
    return {
        "hit_over_reachable": min((told["hit_over_reachable"] or 0.0 for told in ours), default=None),
        "load_max_over_mean": max((told["load_max_over_mean"] for told in ours), default=None),
        "window_max_over_mean": max((told["window_max_over_mean"] for told in ours), default=None),
        "rows": rows,
        "parameters": {
            "requests": len(asked),
            "block_tokens": BLOCK_TOKENS,
            "events_late_s": simulate.DELAY_S,
            "events_lost": simulate.LOST,
            "replayed_batches": REPLAYED,
            "gateways": 2,
            "utilization": simulate.UTILIZATION,
            "window_s": simulate.WINDOW_S,
            "seed": simulate.SEED,
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.routing", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--trace", type=Path, default=None, help="default: the conversation trace in $TURNKEEP_DATA")
    parser.add_argument("--replicas", type=int, action="append", help="default: 4, 8 and 16")
    parser.add_argument("--capacity", type=int, action="append", help="blocks of a replica; default: 5000 and 1000")
    parser.add_argument("--policy", action="append", choices=POLICIES, help="default: all")
    parser.add_argument("--limit", type=int, help="the first requests only")
    parser.add_argument(
        "--quick", action="store_true", help=f"{QUICK_REQUESTS} requests on 4 replicas: shows that it runs"
    )
    parser.add_argument("--plot", type=Path, help="write the rows as an SVG")
    parser.add_argument("--json", action="store_true", help="print only the JSON object on standard output")
    args = parser.parse_args()
    data = os.environ.get("TURNKEEP_DATA")
    trace = args.trace or (Path(data) / "mooncake" / TRACE.name if data else TRACE)
    asked = load(trace, args.limit or (QUICK_REQUESTS if args.quick else None))
    replicas = args.replicas or ([4] if args.quick else list(REPLICAS))
    capacities = args.capacity or ([1000] if args.quick else list(CAPACITIES))
    result = measure(asked, replicas, capacities, args.policy or list(POLICIES))
    if args.plot is not None:
        from bench.routing.plot import drawn

        args.plot.write_text(drawn(result["rows"]))
    if not args.json:
        print("Where turns land")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
