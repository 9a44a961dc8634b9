"""The file format: one that an older version wrote is read, whole, and the session in it goes on.

`tests/data/session-v1.tkkv` was made once, by `python -m tests.engines.local.test_kv_file`, and is never made anew.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from array import array
from pathlib import Path

from engines.contract import EMPTY_DIGEST, Base, chain_digest
from engines.local.kv.tiers.files import PREFIX, read_content, read_header
from tests.engines.local.test_disk_tier import closing, disk_of, engine_on
from tests.engines.local.test_sessions_core import Talk, ids
from tests.engines.local.test_suspension import ROOM, ask, goes_on
from tests.engines.local.tiny import Answers

OLD = Path(__file__).parents[2] / "data" / "session-v1.tkkv"


def spoken() -> list[int]:
    """The ids of the session in the file: two turns of 20, and what the tiny model said to them."""
    file = OLD.read_bytes()
    return list(array("I", file[file.index(array("I", ids(0, 20)).tobytes()) :][: 4 * 50]))


def test_a_file_of_version_1_is_read(tmp_path: Path) -> None:
    assert PREFIX.unpack_from(OLD.read_bytes())[:2] == (b"TKKVFILE", 1)
    with closing(engine_on(tmp_path, pages=40, host_bytes=ROOM)) as engine:
        found = read_header(OLD, disk_of(engine).layout, disk_of(engine).sizes)
    assert found.stored is not None
    assert (found.stored.session, found.stored.salt) == ("s", "t")
    assert array("I", found.stored.ids).tolist() == spoken()
    assert [length for length, _ in found.stored.marks] == [20, 25, 45, 50]
    assert [piece.num_tokens for piece in found.pieces] == [8] * 6 + [1]
    with OLD.open("rb") as file:
        for piece, place in zip(found.pieces, found.places, strict=True):
            assert bool(read_content(file, piece, place).any())


def test_a_session_of_version_1_goes_on(tmp_path: Path) -> None:
    with closing(engine_on(tmp_path, pages=40, host_bytes=ROOM)):
        pass
    shutil.copy(OLD, tmp_path / "0123456789abcdef.tkkv")
    with closing(engine_on(tmp_path, pages=40, host_bytes=ROOM)) as engine:
        talk = Talk(Answers(engine), "s", salt="t")
        talk.path = spoken()
        first = chain_digest(EMPTY_DIGEST, array("I", talk.path[:20]).tobytes())
        for start, stop in ((20, 25), (25, 45), (45, 50)):
            first = chain_digest(first, array("I", talk.path[start:stop]).tobytes())
        talk.marks.append(Base(50, first))
        assert goes_on(talk, engine) == 0


def make(path: Path) -> None:
    with tempfile.TemporaryDirectory() as folder, closing(engine_on(Path(folder), pages=40, host_bytes=ROOM)) as engine:
        talk = Talk(Answers(engine), "s", salt="t")
        for turn in range(2):
            talk.say(ids(turn, 20), 5)
        shutil.copy(ask(engine, "save", "s", "t")["path"], path)


if __name__ == "__main__":
    make(Path(sys.argv[1]))
