"""Databases and engines for the fault tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.gateway.store.conftest import database, postgres_server

__all__ = ["postgres_server"]


BOTH = ("sqlite", pytest.param("postgresql", marks=pytest.mark.postgres))


@pytest.fixture(params=BOTH)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A database of its own for each test, without a schema: `turnkeep serve` migrates it."""
    yield from _of_its_own(request, tmp_path)


@pytest.fixture(scope="module", params=BOTH)
def shared_url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """One for a whole module, on either database, without a schema."""
    yield from _of_its_own(request, tmp_path_factory.mktemp("database"))


def _of_its_own(request: pytest.FixtureRequest, folder: Path) -> Iterator[str]:
    if request.param == "sqlite":
        yield f"sqlite:///{folder}/turnkeep.db"
        return
    with database(request.getfixturevalue("postgres_server"), template="template0") as created:
        yield created


@pytest.fixture(scope="module")
def postgres_url(request: pytest.FixtureRequest) -> Iterator[str]:
    """A database without a schema for a module's own gateways."""
    with database(request.getfixturevalue("postgres_server"), template="template0") as created:
        yield created
