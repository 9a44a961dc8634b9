"""What a replica reads is proven of that replica: two templates under one name are told apart."""

from __future__ import annotations

from pathlib import Path

import pytest

from engines.echo import ECHO_MODEL_DIR, EchoEngine
from gateway.fleet.replica import Replica
from gateway.sessions.models import Models

pytestmark = pytest.mark.anyio
MESSAGES = [{"role": "user", "content": "hello"}]


class Own(EchoEngine):
    """Sends its own tokenizer files, with words of its own in the template."""

    def __init__(self, name: str, end: str) -> None:
        super().__init__(name=name)
        self.epoch, self.end = f"{name}-0", end

    async def tokenizer_file(self, file: str) -> bytes | None:
        path = ECHO_MODEL_DIR / file
        body = path.read_bytes() if path.is_file() else None
        return body + self.end.encode() if body is not None and file == "chat_template.jinja" else body


async def test_each_replica_is_read_by_its_own_template(tmp_path: Path) -> None:
    models = Models(folders={}, cache_dir=tmp_path)
    replicas = [Replica(Own(name, end), "") for name, end in (("a", ""), ("b", "{# newer #} "), ("c", ""))]
    for replica in replicas:
        replica.capabilities = await replica.engine.capabilities()
        await models.learn(replica, replica.capabilities)
    a, b, c = (models.by_ids("echo", replica) for replica in replicas)
    assert a is not None
    assert b is not None
    assert a is c
    assert a.fingerprint() != b.fingerprint()
    assert len(b.render(MESSAGES)) == len(a.render(MESSAGES)) + 4  # a space of its own
    assert (models.tokens("echo", at="a"), models.tokens("echo", at="b")) == (a, b)
    assert models.format(a) is not models.format(b)
    models.forget(replicas[1])
    assert models.tokens("echo", at="b") is a
    assert models.by_ids("echo", replicas[0]) is a
