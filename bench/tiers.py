"""What the tiers below the device pool are worth: a session that comes back from host memory, from disk and after a
restart against one that is computed anew; and many sessions on room for few.

    python -m bench.tiers --json [--model FOLDER] [--threads N] [--folder DIR] [--only PART] [--quick]

docs/bench.md says what each figure is. Last line: one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path

from bench.sessions import find_model
from engines.local.model_process import WAIT_POLICY


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print only the JSON object on standard output")
    parser.add_argument("--model", help="a model folder; default: $TURNKEEP_MODEL_DIR, else the demonstration model")
    parser.add_argument("--threads", type=int, help="CPU threads of the model; default: torch's choice")
    parser.add_argument("--folder", help="where the files of K/V go; default: the system's temporary folder")
    parser.add_argument("--only", choices=["coming_back", "many"], help="one of the two parts")
    parser.add_argument("--quick", action="store_true", help="600 tokens and 6 sessions: shows that it runs")
    args = parser.parse_args()
    os.environ.setdefault("OMP_WAIT_POLICY", WAIT_POLICY)  # before torch comes in
    from bench.tier_runs import measure

    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        result = measure(find_model(args.model), Path(folder), threads=args.threads, quick=args.quick, only=args.only)
    if not args.json:
        print("A session from each tier against one that is computed anew; many sessions on room for few")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
