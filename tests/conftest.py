"""What every test may ask for: the folder of the real small model."""

from __future__ import annotations

import faulthandler
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

# Threads of a torch in this process that wait for each other must not spin: on a shared machine that is 6x the time.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# Kernels are tested in Triton's interpreter where there is no GPU; torch may import triton first, so it is said here.
if shutil.which("nvidia-smi") is None:
    os.environ.setdefault("TRITON_INTERPRET", "1")

MODEL = "smollm2-135m-instruct"

# `make test` gives a worker one file after the other: the longest first, so that none is left for the end.
LONG_FILES = (
    "faults/test_crash.py",
    "e2e/test_openai_client.py",
    "engines/local/test_engine_exact.py",
    "faults/test_compaction_meanwhile.py",
    "faults/test_compaction_summariser.py",
    "faults/test_disconnect.py",
    "faults/test_drain.py",
    "e2e/test_serve_command.py",
    "engines/test_server_model.py",
    "e2e/test_compacted_model.py",
)


# Coverage of gateway/ and compression/ is taken from the tests that stand beside them: tracing takes as much again.
COVERED_BY = ("gateway", "compression", "security")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    tests = Path(__file__).parent
    places = {tests / name: place for place, name in enumerate(LONG_FILES)}
    items.sort(key=lambda item: places.get(item.path, len(places)))
    for item in items:
        if item.path.relative_to(tests).parts[0] not in COVERED_BY:
            item.add_marker("no_cover")


WATCH_S = 60.0  # a timeout that cannot end its test, in a C call or a swallowed exception, is helped on after this
REAL_STDERR = pytest.StashKey[int]()  # what no test captures


def pytest_configure(config: pytest.Config) -> None:
    config.stash[REAL_STDERR] = os.dup(2)
    # Where nobody has configured the log: structlog's own way to print an exception holds the loop for a second.
    plain = structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)
    structlog.configure(processors=[*structlog.get_config()["processors"][:-1], plain])


def watch(item: pytest.Item, after_s: float) -> None:
    """Print where every thread stands and end this worker, if nothing has come between until then."""
    faulthandler.dump_traceback_later(after_s, exit=True, file=item.config.stash[REAL_STDERR])


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    mark = item.get_closest_marker("timeout")
    limit_s = mark.args[0] if mark else float(item.config.getoption("timeout") or 0)
    if limit_s:
        watch(item, limit_s + WATCH_S)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    if item.config.getoption("timeout"):
        watch(item, 2 * WATCH_S)  # a timeout is spent by now, and pytest stops the watch where a test has failed


def model_folders() -> list[Path]:
    """Where the model may lie, in order; `$TURNKEEP_MODEL_DIR` alone where it is set."""
    if configured := os.environ.get("TURNKEEP_MODEL_DIR"):
        return [Path(configured)]
    return [Path(__file__).parent.parent / "models" / MODEL, Path.home() / ".cache/turnkeep/models" / MODEL]


@pytest.fixture(scope="session")
def model_dir() -> Path:
    """The folder of SmolLM2-135M-Instruct (float32); the test is skipped where it was not fetched."""
    for folder in model_folders():
        if (folder / "config.json").is_file():
            return folder
    pytest.skip(f"no model in {', '.join(map(str, model_folders()))}: `make model` fetches it")


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, bool]]:
    """Async tests (`pytest.mark.anyio`) run on asyncio's own loop: a timeout can end a test there, and in uvloop it
    cannot. The product's processes, which tests/e2e and tests/faults start, run on uvloop."""
    return "asyncio", {"use_uvloop": False}
