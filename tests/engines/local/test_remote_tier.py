"""A suspended session lies in a remote store, and any replica of the model takes it up, or erases it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from engines.local.engine import LocalEngine
from engines.local.kv.tiers import remote
from engines.local.kv.tiers.remote import PART_BYTES, RemoteTier, Store, mooncake
from tests.engines.local.test_disk_tier import closing, disk_of, engine_on, settle, the_files
from tests.engines.local.test_suspension import ROOM, a_talk, ask, goes_on
from tests.engines.local.tiny import tiny_engine


class Shelf:
    """A store in memory, with the codes of the real one."""

    def __init__(self) -> None:
        self.held: dict[str, bytes] = {}
        self.full = False

    def put(self, key: str, value: bytes) -> int:
        if self.full:
            return -200
        self.held[key] = value
        return 0

    def get(self, key: str) -> bytes:
        return self.held.get(key, b"")

    def is_exist(self, key: str) -> int:
        return int(key in self.held)

    def remove(self, key: str, force: bool) -> int:
        return 0 if self.held.pop(key, None) is not None else -704

    def close(self) -> int:
        return 0


def with_store(engine: LocalEngine, store: Store) -> LocalEngine:
    assert engine._tiers is not None
    engine._tiers.remote = RemoteTier(store, disk_of(engine).layout, report=lambda line: None)
    return engine


def replica(folder: Path, store: Store) -> LocalEngine:
    return with_store(engine_on(folder, pages=40, host_bytes=ROOM), store)


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "PART_BYTES", 3000)


@pytest.mark.usefixtures("small_parts")
def test_a_session_in_the_store_is_on_no_replica_and_goes_on_at_another(tmp_path: Path) -> None:
    store = Shelf()
    with closing(replica(tmp_path / "one", store)) as one, closing(replica(tmp_path / "two", store)) as two:
        talk = a_talk(one)
        told = ask(one, "suspend", "s", "t", "remote")
        settle(one)
        assert (told["tier"], told["tokens"], told["blocks"]) == ("remote", 75, 10)
        assert one.stats().blocks_free == 40
        assert not the_files(tmp_path / "one")
        assert len(store.held) > 4
        assert ask(two, "resume", "s", "t") == {"tokens": 75, "device": 0, "host": 10, "disk": 10}
        assert goes_on(talk, two) == 0


@pytest.mark.usefixtures("small_parts")
def test_the_replica_that_sent_it_takes_it_up_again(tmp_path: Path) -> None:
    with closing(replica(tmp_path, Shelf())) as engine:
        talk = a_talk(engine)
        ask(engine, "suspend", "s", "t", "remote")
        settle(engine)
        assert ask(engine, "resume", "s", "t")["host"] == 10
        assert goes_on(talk, engine) == 0


@pytest.mark.usefixtures("small_parts")
def test_any_replica_erases_it(tmp_path: Path) -> None:
    store = Shelf()
    with closing(replica(tmp_path / "one", store)) as one, closing(replica(tmp_path / "two", store)) as two:
        a_talk(one)
        ask(one, "suspend", "s", "t", "remote")
        two.forget("s", "t")
        assert two.suspension.erasing or not store.held
        settle(two)
        assert not store.held
        assert ask(two, "resume", "s", "t").code == "not_found"


@pytest.mark.usefixtures("small_parts")
def test_what_fails_leaves_the_session_where_it_was(tmp_path: Path) -> None:
    store = Shelf()
    with closing(replica(tmp_path, store)) as engine:
        talk = a_talk(engine)
        store.full = True
        refused = ask(engine, "suspend", "s", "t", "remote")
        assert refused.code == "storage_failed"
        settle(engine)
        assert engine.stats().remote_failed == 1
        assert goes_on(talk, engine) == 0
        assert len(the_files(tmp_path)) == 1


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("damage", ["lost", "cut", "flipped", "head"])
def test_what_is_damaged_in_the_store_is_not_taken_up(tmp_path: Path, damage: str) -> None:
    store = Shelf()
    with closing(replica(tmp_path / "one", store)) as one, closing(replica(tmp_path / "two", store)) as two:
        talk = a_talk(one)
        ask(one, "suspend", "s", "t", "remote")
        key = next(key for key in store.held if key.endswith("/head" if damage == "head" else "/3"))
        if damage == "lost":
            del store.held[key]
        elif damage == "cut":
            store.held[key] = store.held[key][:-1]
        elif damage == "flipped":
            store.held[key] = bytes([store.held[key][0] ^ 1]) + store.held[key][1:]
        else:
            store.held[key] = b'{"parts": 99999999, "bytes": 1}'
        assert ask(two, "resume", "s", "t").code == ("kv_file_refused" if damage == "flipped" else "storage_failed")
        assert [path.name for path in (tmp_path / "two").iterdir()] == ["lock"]
        talk.marks = talk.marks[:1]
        talk.path = []
        assert goes_on(talk, two) == -1  # as a session that nobody has ever seen


def test_without_a_store_it_is_unsupported(tmp_path: Path) -> None:
    with closing(engine_on(tmp_path, pages=40, host_bytes=ROOM)) as engine:
        a_talk(engine)
        assert ask(engine, "suspend", "s", "t", "remote").code == "unsupported"
    with pytest.raises(ValueError, match="remote needs kv_dir"):
        tiny_engine(40, remote="127.0.0.1:1")


# ------------------------------------------------------------------ the real one
@pytest.fixture(scope="module")
def master() -> Iterator[str]:
    package = pytest.importorskip("mooncake", reason="needs mooncake-transfer-engine (the extra `remote`)")
    program = Path(package.__path__[0]) / "mooncake_master"
    ports = []
    for _ in range(2):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            ports.append(free.getsockname()[1])
    command = [str(program), "-rpc_port", str(ports[0]), "-metrics_port", str(ports[1])]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        for _ in range(200):
            with socket.socket() as probe:
                if not probe.connect_ex(("127.0.0.1", ports[0])):
                    break
            time.sleep(0.05)
        yield f"127.0.0.1:{ports[0]}"
        process.terminate()


@pytest.mark.prove
def test_mooncake_takes_brings_and_forgets_a_session(master: str, tmp_path: Path) -> None:
    """Over TCP on loopback, two clients; files of several parts too."""
    lender, client = mooncake(master, 128 << 20), mooncake(master, 0)
    with closing(replica(tmp_path / "one", lender)) as one, closing(replica(tmp_path / "two", client)) as two:
        talk = a_talk(one)
        assert ask(one, "suspend", "s", "t", "remote")["tier"] == "remote"
        assert ask(two, "resume", "s", "t")["host"] == 10
        assert goes_on(talk, two) == 0
        for engine in (one, two):
            engine.forget("s", "t")
            settle(engine)
        assert ask(one, "resume", "s", "t").code == "not_found"
        assert one._tiers is not None
        tier = one._tiers.remote
        assert tier is not None
        big = tmp_path / "big"
        big.write_bytes(os.urandom(2 * PART_BYTES + 5))
        assert tier.put(7, big).result(60)
        assert tier.get(7, tmp_path / "back").result(60)
        assert (tmp_path / "back").read_bytes() == big.read_bytes()
        tier.remove(7)
        assert not tier.get(7, tmp_path / "gone").result(60)


@pytest.mark.prove
def test_a_store_that_is_not_there_is_refused_at_the_start(tmp_path: Path) -> None:
    pytest.importorskip("mooncake", reason="needs mooncake-transfer-engine (the extra `remote`)")
    code = "from engines.local.kv.tiers.remote import mooncake; mooncake('127.0.0.1:9', 0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode
    assert "no Mooncake Store answers at 127.0.0.1:9" in done.stderr
