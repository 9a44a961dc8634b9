"""Places to count in: memory, a database of either kind, a Redis written in Python (or TURNKEEP_TEST_REDIS_URL)."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest
from fakeredis import TcpFakeServer

from tests.gateway.store.conftest import clock as clock
from tests.gateway.store.conftest import migrated_postgres as migrated_postgres
from tests.gateway.store.conftest import migrated_sqlite as migrated_sqlite
from tests.gateway.store.conftest import postgres_server as postgres_server
from tests.gateway.store.conftest import url as url


@pytest.fixture(scope="session")
def redis_url() -> Iterator[str]:
    if given := os.environ.get("TURNKEEP_TEST_REDIS_URL"):
        yield given
        return
    TcpFakeServer.request_queue_size = 64  # connections that come at once
    TcpFakeServer.block_on_close = False  # of a connection that its client forgot
    server = TcpFakeServer(("127.0.0.1", 0), server_type="redis")
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"redis://127.0.0.1:{server.server_address[1]}/0"
    finally:
        server.shutdown()
        server.server_close()
