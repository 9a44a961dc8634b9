"""`turnkeep erase` and `turnkeep sessions archive` against a gateway that serves."""

import json
from collections.abc import Iterator

import pytest

from gateway.cli import main
from tests.gateway.served import Served, served


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("erase")) as running:
        yield running


def run(gateway: Served, capsys: pytest.CaptureFixture[str], *arguments: str, fails: int = 0) -> str:
    """What it prints."""
    with pytest.raises(SystemExit) as ended:
        main([*arguments, "--url", gateway.url])
    out, err = capsys.readouterr()
    assert int(ended.value.code or 0) == fails, err
    return out


def test_an_end_user_is_erased_and_the_receipt_is_found_again(
    gateway: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    session = gateway.session(user_ref="ann")
    gateway.turn(session, "hello")
    receipt = json.loads(run(gateway, capsys, "erase", "--user", "ann", "--json", "--wait", "5"))
    assert (receipt["status"], receipt["sessions"], receipt["erased"]["turns"]) == ("done", 1, 1)
    shown = run(gateway, capsys, "erase", "--receipt", receipt["id"])
    assert shown.startswith(f"{receipt['id']}: done, 1 sessions")
    assert "turns\t1" in shown
    assert "\tanswered" in shown
    assert f"{receipt['id']}\tuser\t{receipt['user_digest']}\t1\tdone" in run(gateway, capsys, "erase", "--receipts")
    assert json.loads(run(gateway, capsys, "erase", "--receipts", "--json"))["data"][0] == receipt


@pytest.mark.parametrize("words", [[], ["--user", "ann", "--receipts"], ["--user", "ann", "--receipt", "x"]])
def test_one_thing_is_asked_at_once(gateway: Served, capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    run(gateway, capsys, "erase", *words, fails=2)


def test_a_session_is_archived_listed_on_request_and_taken_up_again(
    gateway: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    session = gateway.session()
    assert f"{session}: archived " in run(gateway, capsys, "sessions", "archive", session)
    assert session not in run(gateway, capsys, "sessions", "list")
    assert session in run(gateway, capsys, "sessions", "list", "--archived")
    assert json.loads(run(gateway, capsys, "sessions", "unarchive", session, "--json"))["archived_at"] is None
    assert session in run(gateway, capsys, "sessions", "list")
