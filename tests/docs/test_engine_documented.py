"""The engine's page names every option, every metric, every door and every code that exist."""

from __future__ import annotations

from pathlib import Path

from engines.local.backend import ModelInfo, Status
from engines.local.in_process import InProcess
from engines.local.launch import EngineOptions
from engines.local.metrics import Metrics, Snapshot
from engines.local.refusal import STATUS
from engines.local.server import create_app

DOCS = Path(__file__).parents[2] / "docs"
PAGE, WIRE = (DOCS / "engine.md").read_text(), (DOCS / "engine-wire.md").read_text()
INFO = ModelInfo("m", Path(), 1, 1, 1, "cpu", "float32", "e")


def test_every_option_is_documented() -> None:
    missing = [name for name in EngineOptions.__dataclass_fields__ if f"`{name}`" not in PAGE]
    assert missing == []


def test_every_metric_is_documented() -> None:
    snapshot = Snapshot(INFO, Status(), 0, 0).collect()
    families = [*Metrics().registry.collect(), *snapshot]
    names = [family.name + ("_total" if family.type == "counter" else "") for family in families]
    assert [name for name in names if f"`{name}`" not in PAGE] == []


def test_every_counter_of_the_core_is_documented() -> None:
    import pytest

    load = pytest.importorskip("engines.local.load", reason="needs torch")
    assert [name for name in load.COUNTERS if f"`turnkeep_engine_{name}_total`" not in PAGE] == []


def test_every_door_is_documented() -> None:
    class Nothing: ...

    app = create_app(InProcess(Nothing(), INFO), clock=float, now=float)  # type: ignore[arg-type]
    assert [route.path for route in app.routes if _path(route.path) not in WIRE] == []  # type: ignore[attr-defined]


def _path(path: str) -> str:
    return path.replace(":path", "")


def test_every_refusal_code_is_documented() -> None:
    elsewhere = {"not_found", "method_not_allowed"}  # plain HTTP
    missing = [code for code in STATUS if code not in elsewhere and f"`{code}`" not in WIRE and code not in WIRE]
    assert missing == []
