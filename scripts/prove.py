"""Runs the benches at length and keeps the last line of each, with the machine's description, in bench/results/.

`make prove` calls it after the long tests. A bench that fails is named, and the rest still run.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results"
BENCHES = {
    "sessions": ["bench.sessions", "--json"],
    "gateway": ["bench.gateway", "--json", "--long", "--peers"],
    "store": ["bench.store", "--json"],
    "kv-events": ["bench.kv_events", "--json"],
    "adapters": ["bench.adapters", "--json"],
    "shift": ["bench.shift", "--json"],
    "routing": ["bench.routing", "--json"],
    "stall": ["bench.stall", "--json"],
    "compaction-accounting": ["bench.compaction", "--accounting", "--json"],
    "compaction-facts": ["bench.compaction", "--facts", "--json"],
}


def machine() -> dict[str, object]:
    """What a figure depends on, and nothing that names the machine."""
    load = os.getloadavg() if hasattr(os, "getloadavg") else ()
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
        "load_average_before": [round(value, 1) for value in load],
    }


def prove(name: str, command: list[str]) -> bool:
    print(f"== python -m {' '.join(command)}", flush=True)
    before, began = machine(), time.time()
    done = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    lines = done.stdout.strip().splitlines()
    if done.returncode != 0 or not lines:
        print(f"   failed with code {done.returncode}", flush=True)
        return False
    kept = {
        "command": f"python -m {' '.join(command)}",
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(began)),
        "seconds": round(time.time() - began, 1),
        "machine": before,
        "result": json.loads(lines[-1]),
    }
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(kept, indent=1) + "\n")
    print(f"   {lines[-1]}", flush=True)
    return True


def main() -> int:
    wanted = sys.argv[1:] or list(BENCHES)
    failed = [name for name in wanted if not prove(name, BENCHES[name])]
    if failed:
        print(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
