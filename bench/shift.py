"""What a KV shift does to the answers: next-token distributions after a cut, shifted against computed anew.

    python -m bench.shift --json [--chats 8] [--model FOLDER] [--data FOLDER] [--threads N] [--quick]

Real chats of at least 1,500 tokens (people's, and MT-Bench-101's dialogues joined) are put into the engine, then cut as
a compaction cuts them: system and first turn stay, the middle becomes a short summary, the last turns are kept. The cut
prompt runs through the engine's own pages: with the kept turns shifted, in several ways, and all computed anew.
Compared is every position after the kept turns.
docs/bench.md says what each figure is. Last line: one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

from bench.sessions import find_model
from engines.local.model_process import WAIT_POLICY


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print only the JSON object on standard output")
    parser.add_argument("--chats", type=int, default=8, help="how many; default 8")
    parser.add_argument("--model", help="a model folder; default: $TURNKEEP_MODEL_DIR, else the demonstration model")
    parser.add_argument("--data", help="the folder of real data; default: $TURNKEEP_DATA, else ../shared/data")
    parser.add_argument("--threads", type=int, help="CPU threads of the model; default: torch's choice")
    parser.add_argument("--quick", action="store_true", help="one chat of 600 tokens: shows that it runs")
    args = parser.parse_args()
    data = Path(args.data or os.environ.get("TURNKEEP_DATA") or "../shared/data")
    os.environ.setdefault("OMP_WAIT_POLICY", WAIT_POLICY)  # before torch comes in
    from bench.shift_runs import measure

    count, at_least = (1, 600) if args.quick else (args.chats, 1500)
    result = measure(find_model(args.model), data, count=count, at_least=at_least, threads=args.threads)
    if not args.json:
        print("Next-token distributions after a cut: shifted against computed anew")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
