"""What compaction costs and what it loses.

    python -m bench.compaction --accounting --json

docs/bench.md says what each figure is. Last line: one JSON object.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from bench.compaction.simulate import Shape, accounting
from compression.budget import Policy


def table(result: dict[str, Any]) -> str:
    lines = ["parameters: " + json.dumps(result["parameters"])]
    lines += [
        f"{row['method']:40} {row['summary_calls']:4} summary calls {row['prefill_tokens_per_turn']:9.2f} tokens a turn"
        for row in result["rows"]
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.compaction", description=(__doc__ or "").partition("\n")[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--accounting", action="store_true", help="prefill and summary calls, simulated")
    parser.add_argument("--json", action="store_true", help="print only the JSON object on standard output")
    args = parser.parse_args()
    result = accounting(Shape(), Policy())
    if not args.json:
        print(table(result))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
