"""What every test may ask for: the folder of the real small model."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# Threads of a torch in this process that wait for each other must not spin: on a shared machine that is 6x the time.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

MODEL = "smollm2-135m-instruct"

# `make test` gives a worker one file after the other: the longest first, so that none is left for the end.
LONG_FILES = (
    "faults/test_crash.py",
    "e2e/test_openai_client.py",
    "engines/local/test_engine_exact.py",
    "faults/test_compaction_meanwhile.py",
    "faults/test_compaction_summariser.py",
    "faults/test_disconnect.py",
    "e2e/test_serve_command.py",
    "engines/test_server_model.py",
    "e2e/test_compacted_model.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    tests = Path(__file__).parent
    places = {tests / name: place for place, name in enumerate(LONG_FILES)}
    items.sort(key=lambda item: places.get(item.path, len(places)))


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
