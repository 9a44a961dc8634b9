"""Databases and engines for the fault tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.gateway.store.conftest import database, postgres_server

__all__ = ["postgres_server"]


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.postgres)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A database of its own for each test, without a schema: `turnkeep serve` migrates it."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path}/turnkeep.db"
        return
    with database(request.getfixturevalue("postgres_server"), template="template0") as created:
        yield created


@pytest.fixture(scope="module")
def postgres_url(request: pytest.FixtureRequest) -> Iterator[str]:
    """A database without a schema for a module's own gateways."""
    with database(request.getfixturevalue("postgres_server"), template="template0") as created:
        yield created
