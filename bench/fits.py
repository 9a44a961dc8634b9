"""The table of docs/weights.md: which models fit which cards, with how many sessions. Needs config files only.

python -m bench.fits tests/engines/local/configs
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from engines.local.fit import GIB, fit
from engines.local.footprint import read_footprint

CARDS, TOKENS = (8, 12, 16, 24), 8192


def table(folder: Path) -> Iterator[str]:
    """Markdown; a card's column holds sessions of TOKENS tokens with `full` and with `int4` caches."""
    yield f"| model | weights | GiB | KiB a token, `full` / `int4` | {' | '.join(f'{card} GiB' for card in CARDS)} |"
    yield "|" + "---|" * (4 + len(CARDS))
    for config in sorted(folder.glob("*/config.json")):
        found = read_footprint(config.parent)
        cells = []
        for card in CARDS:
            one = fit(found, card * GIB, (TOKENS,))
            held = one.sessions[TOKENS]
            cells.append(f"{held['full']} / {held['int4']}" if one.fits else "no")
        kib = " / ".join(f"{found.kv_bytes[name] / 1024:.0f}" for name in ("full", "int4"))
        yield f"| {found.name} | {found.weights} | {found.weight_bytes / GIB:.2f} | {kib} | {' | '.join(cells)} |"


if __name__ == "__main__":
    print("\n".join(table(Path(sys.argv[1]))))
