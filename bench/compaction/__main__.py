"""What compaction costs and what it loses.

    python -m bench.compaction --accounting --json
    python -m bench.compaction --facts [--quick] --json [--model FOLDER] [--threads N] [--peers FOLDER]
        [--answers FILE]

docs/bench.md says what each figure is. Last line: one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.compaction import facts
from bench.compaction.simulate import Shape, accounting
from bench.sessions import find_model
from compression.budget import Policy


def table(result: dict[str, Any]) -> str:
    lines = ["parameters: " + json.dumps(result["parameters"])]
    lines += [
        f"{row['method']:40} {row['summary_calls']:4} summary calls {row['prefill_tokens_per_turn']:9.2f} tokens a turn"
        for row in result["rows"]
    ]
    return "\n".join(lines)


def lost_table(result: dict[str, Any]) -> str:
    lines = ["parameters: " + json.dumps(result["parameters"])]
    for row in result["rows"]:
        which = "modelled" if row["modelled"] else "extracted"
        recall = "" if row["reader_recall"] is None else f", read {row['reader_recall']:.2f} of {row['reader_asked']}"
        lines.append(
            f"{which:9} {row['compactions']:2} compactions, {row['method']:34} {row['kept_tokens']:6} tokens,"
            f" lost {row['lost']:3} of {row['facts']:3} ({row['lost_ruled']} ruled, {row['lost_unruled']} unruled)"
            f"{recall}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.compaction", description=(__doc__ or "").partition("\n")[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--accounting", action="store_true", help="prefill and summary calls, simulated")
    what.add_argument("--facts", action="store_true", help="planted facts that are lost, beside other methods")
    parser.add_argument("--json", action="store_true", help="print only the JSON object on standard output")
    parser.add_argument("--quick", action="store_true", help="fewer conversations, and few summaries by the model")
    parser.add_argument("--conversations", type=int, help="conversations that ask no model; default 8")
    parser.add_argument("--modelled", type=int, help="conversations in which the model writes summaries; default 2")
    parser.add_argument("--model", help="a model folder; default: $TURNKEEP_MODEL_DIR, else the demonstration model")
    parser.add_argument("--threads", type=int, help="CPU threads of the model; default: torch's choice")
    parser.add_argument(
        "--peers", type=Path, help="folder in which LangChain's environment is kept; default: thrown away"
    )
    parser.add_argument("--answers", type=Path, help="file in which the model's summaries are kept for another run")
    args = parser.parse_args()
    if args.accounting:
        result, shown = accounting(Shape(), Policy()), table
    else:
        shape = facts.QUICK if args.quick else facts.Shape()
        asked = {"extracted": args.conversations, "modelled": args.modelled}
        shape = replace(shape, **{name: number for name, number in asked.items() if number is not None})
        measured = facts.measure(shape, find_model(args.model), args.threads, peers=args.peers, answers=args.answers)
        result, shown = asyncio.run(measured), lost_table
    if not args.json:
        print(shown(result))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
