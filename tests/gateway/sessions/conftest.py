"""Models of every family of templates, made once a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.sessions.tokens import ModelTokens
from tests.gateway.sessions.families import NOW, Loader, build


@pytest.fixture(scope="session")
def load(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Loader:
    """Loads a family's model by name; its template's clock stands at NOW."""
    made: dict[str, ModelTokens] = {}

    def get(name: str) -> ModelTokens:
        if name not in made:
            folder = build(name, model_dir, tmp_path_factory.mktemp("families") / name)
            made[name] = ModelTokens.load(folder, name=name, clock=lambda: NOW)
        return made[name]

    return get
