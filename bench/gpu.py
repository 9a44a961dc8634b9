"""Checks and measures the engine on a GPU, in under six minutes: kernels against the reference, greedy equality end to
end, tiers with streams, serving.

    python -m bench.gpu [--model FOLDER] [--seconds 300]    on a GPU
    python -m bench.gpu --interpret                         the checks alone, small, in Triton's interpreter on a CPU
    python -m bench.gpu --compile 90                        compiles the kernels for a GPU that is not here

Last line: one JSON object. Exit codes: 0 all checks passed, 1 one failed, 3 there is no GPU (or no triton) here.
A run whose checks all passed is entered in engines/local/kernels/path.py (DEVICE_RUNS), its output in bench/results.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PASSED, FAILED, NO_DEVICE = 0, 1, 3


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--interpret", action="store_true", help="on a CPU, in Triton's interpreter: checks only")
    parser.add_argument("--compile", type=int, metavar="CAPABILITY", help="only compile, for 80, 86, 89, 90, ...")
    parser.add_argument("--model", type=Path, help="a model folder; default: random weights of two sizes")
    parser.add_argument("--seconds", type=float, default=300.0, help="parts that would begin later are left out")
    args = parser.parse_args(arguments)
    if args.compile:
        return _compile(args.compile)
    if args.interpret:
        os.environ["TRITON_INTERPRET"] = "1"  # before triton comes in
    if (lacking := _lacking(args.interpret)) is not None:
        print(f"nothing was checked: {lacking}", file=sys.stderr)
        print(json.dumps({"ok": False, "error": lacking}))
        return NO_DEVICE
    result = run(interpret=args.interpret, model=args.model, until_s=time.monotonic() + args.seconds)
    print(json.dumps(result))
    return PASSED if result["ok"] else FAILED


def _compile(capability: int) -> int:
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise SystemExit("TRITON_INTERPRET is set: nothing would be compiled")
    from bench.gpu_compile import compile_all

    result = compile_all(capability)
    print(json.dumps(result))
    return PASSED if result["ok"] else FAILED


def _lacking(interpret: bool) -> str | None:
    """What is not here. On a GPU machine TRITON_INTERPRET must not be set: nothing would run on the GPU."""
    from importlib.util import find_spec

    import torch

    if find_spec("triton") is None:
        return "triton is not installed"
    if interpret:
        return None
    if not torch.cuda.is_available():
        return "torch sees no GPU; --interpret runs the checks on a CPU"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "TRITON_INTERPRET is set: the kernels would not run on the GPU"
    return None


def run(*, interpret: bool, model: Path | None, until_s: float) -> dict[str, Any]:
    """Part after part; one that raises is a failed check, and the others still run."""
    import torch

    from bench import gpu_checks, gpu_speed

    device = torch.device("cpu" if interpret else "cuda")
    result: dict[str, Any] = {"device": _device(device), "checks": [], "skipped": []}
    parts = [("kernels", gpu_checks.kernels), ("seal", gpu_checks.seal), ("greedy", gpu_checks.greedy)]
    parts += [("sealed_sessions", gpu_checks.sealed_sessions), ("tiers", gpu_checks.tiers)]
    for name, part in parts:
        if time.monotonic() > until_s:
            result["skipped"].append(name)
            continue
        began_s = time.monotonic()
        try:
            found = part(device, model)
        except Exception as error:  # noqa: BLE001  # a compiler's or a driver's error, of any type, is the finding
            found = [gpu_checks.Check(name, False, f"{type(error).__name__}: {error}"[:400])]
        result["checks"] += [check.told() for check in found]
        print(f"{name}: {time.monotonic() - began_s:.1f} s", file=sys.stderr, flush=True)
    if not interpret:
        result["speed"] = gpu_speed.measure(device, model, until_s)
    result["ok"] = not result["skipped"] and all(check["ok"] for check in result["checks"])
    return result


def _device(device: Any) -> dict[str, Any]:
    import torch
    import triton

    told: dict[str, Any] = {"torch": torch.__version__, "triton": triton.__version__}
    if device.type == "cpu":
        return told | {"name": "Triton's interpreter on a CPU"}
    properties = torch.cuda.get_device_properties(device)
    return told | {"name": properties.name, "bytes": properties.total_memory, "cuda": torch.version.cuda}


if __name__ == "__main__":
    sys.exit(main())
