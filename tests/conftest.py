"""What every test may ask for: the folder of the real small model."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

MODEL = "smollm2-135m-instruct"


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
    """Async tests (`pytest.mark.anyio`) run on asyncio over uvloop, as the product does."""
    return "asyncio", {"use_uvloop": True}
