"""Asks whether any installed package has a known weakness: `pip-audit` over this environment. A step of .ci/run.

Ends with 1 where one has, and names it. Where no database of weaknesses can be reached, or it knows none of the
packages (a mirror of the package index may not have them), it says so and ends with 0: no network, no verdict.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

SERVICES = ("pypi", "osv")  # the second is asked where the first knows nothing
WITHIN_S = 40
LEAST_KNOWN = 0.5  # of the packages: with fewer, silence says nothing
ACCEPTED: dict[str, str] = {}  # id of a weakness -> why it does not touch us


def weaknesses(dependencies: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line for each known weakness that is not accepted."""
    return [
        f"{package['name']} {package['version']}: {found['id']} ({', '.join(found.get('aliases', ()))}), "
        f"mended in {', '.join(found.get('fix_versions', ())) or 'no version yet'}"
        for package in dependencies
        for found in package.get("vulns", ())
        if not {found["id"], *found.get("aliases", ())} & set(ACCEPTED)
    ]


def known(dependencies: Sequence[Mapping[str, Any]]) -> float:
    """The share of packages that the database could say anything of."""
    told = [package for package in dependencies if "skip_reason" not in package]
    return len(told) / len(dependencies) if dependencies else 0.0


def asked(service: str) -> tuple[list[dict[str, Any]], str]:
    """(the packages with what is known of each, why there are none)."""
    command = [sys.executable, "-m", "pip_audit", "--format", "json", "--progress-spinner", "off", "--skip-editable"]
    try:
        done = subprocess.run(
            [*command, "--vulnerability-service", service],
            capture_output=True, text=True, timeout=WITHIN_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return [], f"no answer within {WITHIN_S} s"
    try:
        told: list[dict[str, Any]] = json.loads(done.stdout)["dependencies"]
    except (ValueError, KeyError):
        return [], (done.stderr.strip().splitlines() or ["no answer"])[-1][:200]
    return told, ""


def main() -> int:
    for service in SERVICES:
        told, why = asked(service)
        if bad := weaknesses(told):
            print("\n".join(bad))
            return 1
        if (share := known(told)) >= LEAST_KNOWN:
            print(f"{len(told)} packages: no known weakness ({service} knows {share:.0%} of them)")
            return 0
        print(f"{service}: {why or f'knows {share:.0%} of {len(told)} packages'}")
    print("skipped: no database of weaknesses could be asked")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
