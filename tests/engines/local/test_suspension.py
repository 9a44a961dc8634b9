"""A session is put down and goes on: here, after a restart, on another replica; as if it had never stopped."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import Any

import pytest

from engines.local.engine import LocalEngine
from engines.local.kv.session_cache import session_tag
from engines.local.kv.tiers.files import SUFFIX
from engines.local.refusal import Refusal
from tests.engines.local.test_disk_tier import closing, disk_of, engine_on, settle, talk_block, the_files
from tests.engines.local.test_sessions_core import Talk, ids
from tests.engines.local.tiny import Answers, request, tiny_engine

NUMBERS = count(1)
ROOM = 1 << 20


def ask(engine: LocalEngine, what: str, *args: Any) -> Any:
    """What came of suspend, resume, save or adopt."""
    number = next(NUMBERS)
    getattr(engine.suspension, what)(number, *args)
    for _ in range(2000):
        answers = dict(engine.suspension.settled())
        if number in answers:
            return answers[number]
        engine.step()
    raise AssertionError(f"{what} did not come to an end")


def a_talk(engine: LocalEngine, turns: int = 3) -> Talk:
    talk = Talk(Answers(engine), "s", salt="t")
    for turn in range(turns):
        talk.say(ids(turn, 20), 5)
    return talk


def goes_on(talk: Talk, engine: LocalEngine) -> int:
    """Its next turn, against plain computation -> tokens of the path that were computed again."""
    talk.run = Answers(engine)
    length = len(talk.path)
    return length - 1 - talk.run.cached[talk.say(ids(77, 9), 6)]


def test_a_suspended_session_takes_no_room_and_goes_on_whole(tmp_path: Path) -> None:
    with closing(engine_on(tmp_path, pages=40, host_bytes=ROOM)) as engine:
        talk = a_talk(engine)
        told = ask(engine, "suspend", "s", "t")
        assert told == {
            "session": "s", "salt": "t", "tokens": 75, "blocks": 10, "tier": "disk",
            "bytes": the_files(tmp_path)[0].stat().st_size,
        }  # fmt: skip
        assert engine.stats().blocks_free == 40
        assert engine.stats().tiers["host"]["bytes"] == 0
        engine.check()
        assert goes_on(talk, engine) == 0
        assert engine.stats().disk_tokens == 74


def test_a_resumed_session_waits_in_host_memory(tmp_path: Path) -> None:
    with closing(engine_on(tmp_path, pages=40, host_bytes=ROOM)) as engine:
        talk = a_talk(engine)
        ask(engine, "suspend", "s", "t")
        assert ask(engine, "resume", "s", "t") == {"tokens": 75, "device": 0, "host": 10, "disk": 10}
        assert ask(engine, "resume", "s", "t") == {"tokens": 75, "device": 0, "host": 10, "disk": 10}
        assert goes_on(talk, engine) == 0


def test_it_goes_on_after_a_restart(tmp_path: Path) -> None:
    with closing(engine_on(tmp_path, pages=40, host_bytes=ROOM)) as engine:
        talk = a_talk(engine)
        ask(engine, "suspend", "s", "t")
    with closing(engine_on(tmp_path, pages=40, host_bytes=ROOM)) as engine:
        assert [(kept.session, kept.tokens) for kept in engine.sessions()] == [("s", 75)]
        engine.check()
        assert goes_on(talk, engine) == 0  # by its base: the path and its marks are in the file


def test_it_goes_on_at_another_replica(tmp_path: Path) -> None:
    with closing(engine_on(tmp_path / "one", pages=40, host_bytes=ROOM)) as one:
        talk = a_talk(one)
        file = Path(ask(one, "save", "s", "t")["path"])
        assert one.stats().blocks_cached == 10, "saving is not suspending"
        with closing(engine_on(tmp_path / "two", pages=40, host_bytes=ROOM)) as two:
            came = tmp_path / "two" / "incoming.part"
            came.write_bytes(file.read_bytes())
            assert ask(two, "adopt", came, "s", "t")["tokens"] == 75
            assert goes_on(talk, two) == 0


def test_suspending_twice_leaves_one_file(tmp_path: Path) -> None:
    with closing(engine_on(tmp_path, pages=40, host_bytes=ROOM)) as engine:
        talk = a_talk(engine)
        ask(engine, "suspend", "s", "t")
        assert goes_on(talk, engine) == 0
        told = ask(engine, "suspend", "s", "t")
        settle(engine)
        assert told["tokens"] == len(talk.path)
        assert len(the_files(tmp_path)) == 1
        assert goes_on(talk, engine) == 0


def test_a_session_whose_blocks_lie_on_the_disk_already_is_suspended_from_there(tmp_path: Path) -> None:
    with closing(engine_on(tmp_path)) as engine:
        talk = Talk(Answers(engine), "s", salt="t")
        talk.say(ids(1, 60), 4)
        for number in range(4):
            Talk(Answers(engine), f"other{number}", salt="t").say(ids(2 + number, 70), 4)
        settle(engine)
        assert ask(engine, "suspend", "s", "t")["blocks"] == 8
        assert goes_on(talk, engine) == 0


def test_without_a_disk_it_goes_to_host_memory() -> None:
    engine = tiny_engine(40, host_bytes=ROOM)
    talk = a_talk(engine)
    told = ask(engine, "suspend", "s", "t")
    assert (told["tier"], told["blocks"]) == ("host", 10)
    assert engine.stats().blocks_free == 40
    engine.check()
    assert goes_on(talk, engine) == 0


def test_what_others_use_too_stays_where_it_is() -> None:
    engine = tiny_engine(40, host_bytes=ROOM)
    run = Answers(engine)
    for name in ("one", "two"):
        Talk(run, name, salt="t").say([*ids(1, 16), *ids(len(name) + ord(name[0]), 20)], 5)
    ask(engine, "suspend", "one", "t")
    assert engine.stats().blocks_cached == 5
    engine.check()


def test_what_cannot_be_done_says_so(tmp_path: Path) -> None:
    engine = tiny_engine(40)
    a_talk(engine)
    refused = [ask(engine, what, "s", "t") for what in ("suspend", "save")]
    assert [one.code for one in refused] == ["unsupported", "unsupported"]
    assert ask(engine, "suspend", "nobody", "t").code == "not_found"
    with closing(engine_on(tmp_path, pages=40, host_bytes=ROOM, disk_bytes=3000)) as small:
        talk = a_talk(small)
        refused = ask(small, "suspend", "s", "t")
        assert isinstance(refused, Refusal)
        assert (refused.code, refused.status) == ("storage_full", 507)
        assert goes_on(talk, small) == 0, "what is not in a file stays on the device"


def test_a_session_that_runs_is_not_put_down(tmp_path: Path) -> None:
    with closing(engine_on(tmp_path, pages=40, host_bytes=ROOM)) as engine:
        a_talk(engine)
        engine.submit(request("r", ids(5, 10), 8, session="s", salt="t"))
        assert ask(engine, "suspend", "s", "t").code == "session_busy"
        Answers(engine).run()


def test_a_session_that_is_forgotten_while_it_is_written_is_in_no_file(tmp_path: Path) -> None:
    with closing(engine_on(tmp_path, pages=40, host_bytes=ROOM)) as engine:
        talk = a_talk(engine)
        engine.suspension.suspend(7, "s", "t")
        engine.forget("s", "t")
        assert engine.suspension.erasing or not the_files(tmp_path)
        settle(engine)
        assert not engine.suspension.erasing
        assert not the_files(tmp_path)
        assert isinstance(dict(engine.suspension.settled())[7], Refusal)
        assert not engine.sessions()
        assert talk.path


def test_a_forgotten_session_is_in_no_file(tmp_path: Path) -> None:
    with closing(engine_on(tmp_path, pages=40, host_bytes=ROOM)) as engine:
        talk = a_talk(engine)
        ask(engine, "suspend", "s", "t")
        assert any(talk_block(talk, 1) in file.read_bytes() for file in the_files(tmp_path))
        engine.forget("s", "t")
        settle(engine)
        assert not the_files(tmp_path)
        assert session_tag("s", "t") not in {
            u for f in disk_of(engine).catalogue.files.values() for p in f.pieces for u in p.users
        }


@pytest.mark.parametrize("damage", ["flip", "cut", "rubbish", "empty"])
def test_a_damaged_file_is_not_adopted(tmp_path: Path, damage: str) -> None:
    with closing(engine_on(tmp_path / "one", pages=40, host_bytes=ROOM)) as one:
        a_talk(one)
        whole = bytearray(Path(ask(one, "save", "s", "t")["path"]).read_bytes())
    if damage == "flip":
        whole[-100] ^= 1
    elif damage == "cut":
        del whole[-100:]
    elif damage == "rubbish":
        whole[:] = b"x" * 5000
    else:
        whole.clear()
    with closing(engine_on(tmp_path / "two", pages=40, host_bytes=ROOM)) as two:
        came = tmp_path / "two" / "incoming.part"
        came.write_bytes(whole)
        assert ask(two, "adopt", came, "s", "t").code == "kv_file_refused"
        assert not came.exists()
        assert not list((tmp_path / "two").glob(f"*{SUFFIX}"))
        assert not two.sessions()


def test_a_file_of_another_session_is_not_adopted(tmp_path: Path) -> None:
    with closing(engine_on(tmp_path / "one", pages=40, host_bytes=ROOM)) as one:
        a_talk(one)
        whole = Path(ask(one, "save", "s", "t")["path"]).read_bytes()
        came = tmp_path / "one" / "incoming.part"
        came.write_bytes(whole)
        assert ask(one, "adopt", came, "s", "another salt").code == "kv_file_refused"


def test_a_file_of_another_model_is_not_adopted(tmp_path: Path) -> None:
    with closing(engine_on(tmp_path / "one", pages=40, host_bytes=ROOM)) as one:
        a_talk(one)
        whole = Path(ask(one, "save", "s", "t")["path"]).read_bytes()
    with closing(engine_on(tmp_path / "two", pages=40, host_bytes=ROOM, block_size=16)) as two:
        came = tmp_path / "two" / "incoming.part"
        came.write_bytes(whole)
        refused = ask(two, "adopt", came, "s", "t")
        assert (refused.code, refused.status) == ("other_model", 409)
        assert "block_size 8" in refused.message
