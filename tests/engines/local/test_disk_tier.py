"""Blocks that host memory gives up come back from files; what is wrong with a file costs a computation (F13, F14)."""

from __future__ import annotations

import errno
import os
import random
import threading
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from engines.local.engine import LocalEngine
from engines.local.kv.tiers import disk_jobs, files
from engines.local.kv.tiers.disk import DiskTier
from engines.local.kv.tiers.files import PREFIX, SUFFIX, VERSION
from tests.engines.local.test_sessions_core import Talk, ids
from tests.engines.local.tiny import Answers, request, tiny_engine

PAGE = 4096  # room of one piece of the tiny model in host memory
HOST = 12 * PAGE


def engine_on(folder: Path, *, pages: int = 10, **settings: object) -> LocalEngine:
    return tiny_engine(pages, **{"host_bytes": HOST, "kv_dir": str(folder), "eviction": "lru"} | settings)


def disk_of(engine: LocalEngine) -> DiskTier:
    assert engine._tiers is not None
    assert engine._tiers.disk is not None
    return engine._tiers.disk


@contextmanager
def closing(engine: LocalEngine) -> Iterator[LocalEngine]:
    try:
        yield engine
    finally:
        disk_of(engine).close()


def settle(engine: LocalEngine) -> None:
    while engine.has_work():
        engine.step()
    engine.check()


def on_disk(engine: LocalEngine) -> Talk:
    """A session of 64 tokens, all of it in files, because others came after it."""
    talk = Talk(Answers(engine), "s", salt="t")
    talk.say(ids(1, 60), 4)
    for number in range(4):
        Talk(Answers(engine), f"other{number}", salt="t").say(ids(2 + number, 70), 4)
    settle(engine)
    return talk


def the_files(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"*{SUFFIX}"))


def test_a_session_comes_back_from_files_whole(tmp_path: Path) -> None:
    with closing(engine_on(tmp_path)) as engine:
        talk = on_disk(engine)
        usage = talk.run.last[talk.say(ids(9, 4), 4)].usage
        assert usage is not None
        assert (usage.cached_tokens, usage.disk_tokens, usage.host_tokens) == (63, 63, 0)
        stats = engine.stats()
        assert stats.disk_tokens >= 63
        assert stats.tiers["disk"]["bytes"] == sum(file.stat().st_size for file in the_files(tmp_path))
        assert not stats.disk_failed_reads
        assert not stats.pieces_lost


def test_blocks_in_files_outlive_the_engine(tmp_path: Path) -> None:
    with closing(engine_on(tmp_path)) as engine:
        path = on_disk(engine).path
    with closing(engine_on(tmp_path)) as engine:
        talk = Talk(Answers(engine), "again", salt="t")
        assert talk.run.cached[talk.say([*path, *ids(9, 4)], 4)] == 56  # but for the tail: no session named it


def test_the_bound_holds_and_the_oldest_files_go(tmp_path: Path) -> None:
    with closing(engine_on(tmp_path, disk_bytes=30_000)) as engine:
        on_disk(engine)
        for number in range(6):
            Talk(Answers(engine), f"more{number}", salt="t").say(ids(20 + number, 70), 4)
            settle(engine)
            assert sum(file.stat().st_size for file in the_files(tmp_path)) <= 30_000
        assert disk_of(engine).counts.evicted


def test_the_other_requests_go_on_while_one_waits_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = threading.Event()
    real = disk_jobs.read
    monkeypatch.setattr(disk_jobs, "read", lambda *args: (held.wait(30), real(*args))[1])
    with closing(engine_on(tmp_path)) as engine:
        talk = on_disk(engine)
        run = talk.run
        engine.submit(request("waits", [*talk.path, 1, 2], 3, salt="t"))
        engine.submit(request("goes", ids(50, 5), 3, salt="t"))
        while "goes" not in run.last:
            run.step()
        assert "waits" not in run.cached
        held.set()
        while "waits" not in run.last:
            run.step()
        assert run.cached["waits"] == 56


def test_a_disk_that_hangs_is_waited_for_no_longer_than_it_is_worth(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = threading.Event()
    real = disk_jobs.read
    monkeypatch.setattr(disk_jobs, "read", lambda *args: (held.wait(30), real(*args))[1])
    monkeypatch.setattr("engines.local.kv.tiers.exchange.PATIENCE_S", 0.02)
    with closing(engine_on(tmp_path)) as engine:
        talk = on_disk(engine)
        try:
            engine.submit(request("computed", [*talk.path, 1, 2], 3, salt="t"))
            while "computed" not in talk.run.last:
                talk.run.step()
            assert talk.run.cached["computed"] == 0
        finally:
            held.set()


# ------------------------------------------------------------------ F14
def test_a_flipped_bit_costs_a_computation_and_no_answer(tmp_path: Path) -> None:
    with closing(engine_on(tmp_path)) as engine:
        talk = on_disk(engine)
        for file in the_files(tmp_path):
            content = bytearray(file.read_bytes())
            content[-700] ^= 16
            file.write_bytes(content)
        name = talk.say(ids(9, 4), 4)  # compares with what any right engine says
        assert talk.run.cached[name] < 63
        assert engine.stats().disk_failed_reads >= 1


def test_a_file_that_ends_too_early_costs_a_computation(tmp_path: Path) -> None:
    with closing(engine_on(tmp_path)) as engine:
        talk = on_disk(engine)
        for file in the_files(tmp_path):
            os.truncate(file, file.stat().st_size - 1500)
        assert talk.run.cached[talk.say(ids(9, 4), 4)] < 63
        assert engine.stats().disk_failed_reads >= 1


def test_a_file_that_is_gone_costs_a_computation(tmp_path: Path) -> None:
    with closing(engine_on(tmp_path)) as engine:
        talk = on_disk(engine)
        for file in the_files(tmp_path):
            file.unlink()
        assert talk.run.cached[talk.say(ids(9, 4), 4)] == 0
        assert engine.stats().disk_failed_reads >= 1


def test_an_unreadable_disk_costs_a_computation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with closing(engine_on(tmp_path)) as engine:
        talk = on_disk(engine)
        monkeypatch.setattr(disk_jobs, "read_content", fail)
        assert talk.run.cached[talk.say(ids(9, 4), 4)] == 0
        assert engine.stats().disk_failed_reads >= 1


def test_a_file_of_another_model_is_not_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with closing(engine_on(tmp_path)) as engine:
        path = on_disk(engine).path
    with closing(LocalEngine(engine.model, engine.config, engine.clock, fingerprint="another")) as engine:
        talk = Talk(Answers(engine), "again", salt="t")
        assert talk.run.cached[talk.say([*path, *ids(9, 4)], 4)] == 0
        assert engine.stats().disk_refused_files > 0
    assert "is not used: K/V of fingerprint , this engine has another" in capsys.readouterr().err


def test_a_file_of_another_block_size_is_not_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with closing(engine_on(tmp_path)) as engine:
        on_disk(engine)
    with closing(engine_on(tmp_path, block_size=16)) as engine:
        assert engine.stats().disk_refused_files > 0
    assert "K/V of block_size 8, this engine has 16" in capsys.readouterr().err
    assert not the_files(tmp_path)


def test_no_damage_to_a_header_is_believed(tmp_path: Path) -> None:
    """Every header with bytes changed, or cut, is refused as a BadFile; none is read as something else."""
    with closing(engine_on(tmp_path)) as engine:
        on_disk(engine)
        layout, sizes = disk_of(engine).layout, disk_of(engine).sizes
    whole = the_files(tmp_path)[0].read_bytes()
    length = PREFIX.unpack_from(whole)[2]
    draw = random.Random(1)
    victim = tmp_path / "victim"
    for _ in range(150):
        damaged = bytearray(whole)
        if draw.random() < 0.3:
            del damaged[draw.randrange(len(damaged)) :]
        else:
            damaged[draw.randrange(PREFIX.size + length - 4)] ^= 1 << draw.randrange(8)
        victim.write_bytes(damaged)
        if damaged[20:24] != whole[20:24] and len(damaged) == len(whole):
            continue  # the four bytes that say nothing
        with pytest.raises(files.BadFile):
            files.read_header(victim, layout, sizes)
    newer = bytearray(whole)
    newer[8] = VERSION + 1
    victim.write_bytes(newer)
    with pytest.raises(files.BadFile, match="of version 2, this engine reads up to 1"):
        files.read_header(victim, layout, sizes)


# ------------------------------------------------------------------ F13
def test_a_full_disk_ends_the_writing_and_no_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with closing(engine_on(tmp_path)) as engine:
        talk = on_disk(engine)
        assert not list(tmp_path.glob("*.part"))
        assert not the_files(tmp_path)
        assert talk.run.cached[talk.say(ids(9, 4), 4)] == 0
        stats = engine.stats()
        assert stats.disk_failed_writes == 1, "it was tried again before its time"
        assert stats.pieces_lost > 0
        assert "No space left on device" in capsys.readouterr().err
        monkeypatch.undo()
        disk_of(engine)._silent_until_s = 0.0  # as after half a minute
        other = on_disk(engine)
        assert other.run.cached[other.say(ids(9, 4), 4)] >= 63


@pytest.mark.parametrize("device", ["/dev/full"])
def test_a_device_without_room_is_an_error_that_is_caught(tmp_path: Path, device: str) -> None:
    with closing(engine_on(tmp_path)) as engine:
        on_disk(engine)
        layout, sizes = disk_of(engine).layout, disk_of(engine).sizes
        found = files.read_header(the_files(tmp_path)[0], layout, sizes)
        with found.path.open("rb") as file:
            contents = [files.read_content(file, p, at) for p, at in zip(found.pieces, found.places, strict=True)]
        link = tmp_path / f"full{files.UNFINISHED}"
        link.symlink_to(device)
        with pytest.raises(OSError, match="No space left"):
            files.write_file(link.with_suffix(SUFFIX), layout, found.pieces, contents)
        assert not link.is_symlink()


# ------------------------------------------------------------------ erasure
def test_what_is_forgotten_is_in_no_file(tmp_path: Path) -> None:
    with closing(engine_on(tmp_path)) as engine:
        talk = on_disk(engine)
        mine = [talk_block(talk, at) for at in range(7)]
        assert all(any(block in file.read_bytes() for file in the_files(tmp_path)) for block in mine)
        engine.forget("s", "t")
        settle(engine)
        assert not disk_of(engine).erasing
        assert not any(block in file.read_bytes() for block in mine for file in the_files(tmp_path))
        assert any(piece.users for file in disk_of(engine).catalogue.files.values() for piece in file.pieces), (
            "others stay"
        )
        again = Talk(Answers(engine), "s", salt="t")
        assert again.run.cached[again.say(ids(1, 60), 4)] == 0
    with closing(engine_on(tmp_path)) as engine:
        assert engine.stats().disk_refused_files == 0
        again = Talk(Answers(engine), "s", salt="t")
        assert again.run.cached[again.say(ids(1, 60), 4)] == 0


def test_a_folder_belongs_to_one_engine(tmp_path: Path) -> None:
    with closing(engine_on(tmp_path)), pytest.raises(ValueError, match="another engine's"):
        engine_on(tmp_path)


def talk_block(talk: Talk, at: int) -> bytes:
    return array("I", talk.path[at * 8 : at * 8 + 8]).tobytes()
