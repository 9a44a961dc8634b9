"""The words of `turnkeep` that need no running gateway: what they print, and how each failure ends."""

import json
import socket
import sqlite3
from pathlib import Path

import pytest

from gateway.cli import main
from gateway.commands.chat import event_end, event_text, turn_summary
from gateway.commands.failure import ExitCode
from gateway.commands.greeting import greeting
from gateway.commands.options import filled, moment
from gateway.commands.sessions import compaction_line, turn_line
from gateway.settings import DEMO_MODEL, Settings
from gateway.tenancy import KEY

Outcome = tuple[int, str, str]


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TURNKEEP_MODELS", str(tmp_path / "models"))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))  # the children run here, too
    for name in ("TURNKEEP_MODEL_DIR", "TURNKEEP_API_KEY", "TURNKEEP_URL", "TURNKEEP_CONFIG"):
        monkeypatch.delenv(name, raising=False)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> Outcome:
    """Exit code, standard output, standard error."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    out, err = capsys.readouterr()
    return int(ended.value.code or 0), out, err


def test_the_words_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--help")
    assert code == 0
    for word in ("serve", "engine", "migrate", "models", "keys", "sessions", "replicas", "chat", "check"):
        assert f"  {word} " in out


def test_a_setting_that_cannot_be_ends_with_its_place(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TURNKEEP_PORT", "eighty")
    code, _, err = run(capsys, "serve")
    assert code == ExitCode.SETTINGS
    assert "TURNKEEP_PORT: port:" in err


def test_an_option_is_named_as_it_was_given(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--database: database_url:" in run(capsys, "migrate", "--database", "mysql://x")[2]


def test_a_port_in_use_ends_with_another_to_take(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, _, err = run(capsys, "serve", "--port", str(port), "--model", "echo")
    assert code == ExitCode.ADDRESS
    assert f"Port {port} on 127.0.0.1 is in use" in err
    assert "--port" in err


def test_an_address_of_another_machine_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "serve", "--host", "192.0.2.1", "--model", "echo")
    assert code == ExitCode.ADDRESS
    assert "--host" in err


def test_a_database_newer_than_the_code_is_left_alone(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run(capsys, "migrate")[0] == 0
    database = tmp_path / ".turnkeep" / "turnkeep.db"
    with sqlite3.connect(database) as connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
    connection.close()
    for words in (["serve", "--port", "0", "--model", "echo"], ["migrate"], ["keys", "list"], ["check"]):
        code, _, err = run(capsys, *words)
        assert code == ExitCode.DATABASE, words
        assert "9999" in err
        assert "newer version" in err


def test_a_database_that_does_not_answer_is_told_without_its_password(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "migrate", "--database", "postgresql://me:hush@127.0.0.1:1/none")
    assert code == ExitCode.DATABASE
    assert "did not answer" in err
    assert "hush" not in err


def test_a_model_that_is_not_there_ends_with_what_to_give(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, _, err = run(capsys, "models", "path", "./no-such-folder")
    assert code == ExitCode.MODEL
    assert "give a folder" in err
    (tmp_path / "empty").mkdir()
    code, _, err = run(capsys, "models", "path", "empty")
    assert code == ExitCode.MODEL
    assert "config.json" in err


def test_serve_with_a_model_that_is_not_there_ends_before_anything_listens(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["serve", "--port", "0", "--model", "./no-such-folder"])
    assert ended.value.code == ExitCode.MODEL
    assert "no model folder './no-such-folder'" in capfd.readouterr().err


def test_migrate_says_where_the_database_stands_and_may_be_repeated(capsys: pytest.CaptureFixture[str]) -> None:
    first, again = run(capsys, "migrate"), run(capsys, "migrate")
    assert first == again
    assert first[0] == 0
    assert "is at schema" in first[1]


def test_a_key_is_made_listed_and_revoked(capsys: pytest.CaptureFixture[str]) -> None:
    run(capsys, "migrate")
    code, out, err = run(capsys, "keys", "create", "laptop", "--days", "2")
    key = out.strip()
    assert code == 0
    assert KEY.fullmatch(key)
    assert "cannot be shown again" in err
    made = json.loads(run(capsys, "keys", "create", "boss", "--admin", "--json")[1])
    assert "admin" in made["scopes"]
    listed = json.loads(run(capsys, "keys", "list", "--json")[1])
    assert [entry["name"] for entry in listed] == ["boss", "laptop"]
    assert listed[1]["expires_at"] - listed[1]["created_at"] == 2 * 86_400
    assert key not in json.dumps(listed)
    assert run(capsys, "keys", "revoke", key[:11] + "...")[0] == 0
    rows = run(capsys, "keys", "list")[1].splitlines()
    assert "good" in rows[1]
    assert "revoked" in rows[2]
    assert run(capsys, "keys", "revoke", "tk-unknown0")[0] == ExitCode.REFUSED


def test_a_key_is_rotated_and_both_are_listed_with_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    run(capsys, "migrate")
    old = json.loads(run(capsys, "keys", "create", "laptop", "--tenant", "acme", "--json")[1])
    code, out, err = run(capsys, "keys", "rotate", old["id"] + "...", "--grace", "60")
    new = out.strip()
    assert code == 0
    assert KEY.fullmatch(new)
    assert f"{old['id']}... ends 20" in err
    rows = run(capsys, "keys", "list", "--tenant", "acme")[1].splitlines()
    assert rows[1].startswith(new[:11])
    assert rows[1].endswith("good")
    assert rows[2].endswith(f", replaced by {new[:11]}")
    code, _, err = run(capsys, "keys", "rotate", old["id"])
    assert (code, new[:11] in err) == (ExitCode.REFUSED, True)
    again = json.loads(run(capsys, "keys", "rotate", new[:11], "--grace", "0", "--json")[1])
    assert (again["replaces"], again["state"], again["old"]["state"]) == (new[:11], "active", "expired")
    assert run(capsys, "keys", "rotate", again["id"], "--tenant", "other")[0] == ExitCode.REFUSED


def test_the_last_admin_key_goes_only_by_force(capsys: pytest.CaptureFixture[str]) -> None:
    run(capsys, "migrate")
    key_id = json.loads(run(capsys, "keys", "create", "boss", "--admin", "--json")[1])["id"]
    for words in (["revoke", key_id], ["rotate", key_id, "--grace", "0"]):
        code, _, err = run(capsys, "keys", *words)
        assert (code, "the last admin key that works" in err) == (ExitCode.REFUSED, True)
    told = json.loads(run(capsys, "keys", "revoke", key_id, "--force", "--json")[1])
    assert told["state"] == "revoked"


def test_tenants_are_made_once_listed_and_shown(capsys: pytest.CaptureFixture[str]) -> None:
    run(capsys, "migrate")
    assert run(capsys, "tenants", "create", "acme", "--name", "Acme & sons")[0] == 0
    assert run(capsys, "tenants", "create", "acme")[0] == ExitCode.REFUSED
    assert run(capsys, "tenants", "create", "a/b")[0] == ExitCode.SETTINGS
    run(capsys, "keys", "create", "--tenant", "acme")
    shown = json.loads(run(capsys, "tenants", "show", "acme", "--json")[1])
    assert (shown["name"], shown["working_keys"]) == ("Acme & sons", 1)
    assert [entry["id"] for entry in json.loads(run(capsys, "tenants", "list", "--json")[1])] == ["acme", "default"]
    assert run(capsys, "tenants", "show", "nobody")[0] == ExitCode.REFUSED


def test_what_commands_do_stands_in_the_audit_log(capsys: pytest.CaptureFixture[str]) -> None:
    run(capsys, "migrate")
    assert run(capsys, "audit")[2].startswith("Nothing was done yet")
    key_id = json.loads(run(capsys, "keys", "create", "hush", "--tenant", "acme", "--json")[1])["id"]
    new = json.loads(run(capsys, "keys", "rotate", key_id, "--json")[1])["id"]
    run(capsys, "keys", "revoke", key_id)
    run(capsys, "keys", "revoke", key_id)
    told = json.loads(run(capsys, "audit", "--json")[1])["data"]
    assert sorted((line["who"], line["tenant"], line["action"], line["target"]) for line in told) == [
        ("cli", "acme", "key.create", key_id),
        ("cli", "acme", "key.revoke", key_id),
        ("cli", "acme", "key.rotate", key_id),
        ("cli", "acme", "tenant.create", "acme"),
    ]
    assert next(line["details"]["replaced_by"] for line in told if line["action"] == "key.rotate") == new
    rows = run(capsys, "audit", "--action", "key.revoke", "--days", "1")[1].splitlines()
    assert len(rows) == 2
    assert "hush" not in json.dumps(told)
    code, _, err = run(capsys, "audit", "--limit", "2")
    cursor = err.split()[-1]
    assert (code, len(run(capsys, "audit", "--limit", "2", "--cursor", cursor)[1].splitlines())) == (0, 3)
    assert run(capsys, "audit", "--cursor", "x")[0] == ExitCode.REFUSED


def test_a_key_with_a_scope_that_cannot_be_is_not_made(capsys: pytest.CaptureFixture[str]) -> None:
    run(capsys, "migrate")
    code, _, err = run(capsys, "keys", "create", "x", "--scope", "root")
    assert code == ExitCode.SETTINGS
    assert "no scope root" in err
    assert json.loads(run(capsys, "keys", "list", "--json")[1]) == []


def test_keys_before_the_database_is_made_say_how_to_make_it(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "keys", "list")
    assert code == ExitCode.DATABASE
    assert "turnkeep migrate" in err


def test_check_explains_each_value_with_its_source(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "turnkeep.toml").write_text("\nlease_s = 8.0\n")
    monkeypatch.setenv("TURNKEEP_SECRET", "hush" * 10)
    explained = {e["name"]: e for e in json.loads(run(capsys, "check", "--explain", "--json")[1])}
    assert explained["lease_s"]["source"] == "turnkeep.toml:2"
    assert explained["secret"] == {
        "name": "secret",
        "value": "********",
        "source": "TURNKEEP_SECRET",
        "description": Settings.model_fields["secret"].description,
    }
    assert "lease_s\t8.0\tturnkeep.toml:2" in run(capsys, "check", "--explain")[1].splitlines()


def test_check_changes_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TURNKEEP_PORT", "0")
    monkeypatch.setenv("TURNKEEP_MODEL", "echo")
    code, out, _ = run(capsys, "check")
    assert code == 0
    assert "to be migrated" in out
    assert list(tmp_path.iterdir()) == []


def test_models_lists_folders_that_hold_a_model(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, err = run(capsys, "models", "list")
    assert (code, out) == (0, "")
    assert "models fetch" in err
    folder = tmp_path / "models" / "small"
    folder.mkdir(parents=True)
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (folder / name).write_text("{}")
    [found] = json.loads(run(capsys, "models", "list", "--json")[1])
    assert found == {"name": "small", "folder": str(folder), "bytes": 6}
    assert run(capsys, "models", "path", str(folder))[1].strip() == str(folder)


@pytest.mark.parametrize("words", [["sessions", "list"], ["sessions", "show", "s"], ["chat", "hello"]])
def test_no_gateway_at_the_url_says_how_to_start_one(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    code, _, err = run(capsys, *words, "--url", "http://127.0.0.1:1")
    assert code == ExitCode.UNREACHABLE
    assert "turnkeep serve" in err


def test_a_url_that_is_none_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "sessions", "list", "--url", "gateway")
    assert code == ExitCode.UNREACHABLE
    assert "http://HOST:PORT" in err


def test_the_greeting_of_a_first_run_shows_the_key_a_curl_and_the_way_to_a_better_model() -> None:
    text = greeting(Settings(), ("127.0.0.1", 8080), "tk-secret", "0001")
    for said in ("http://127.0.0.1:8080/v1", "/admin", "/docs", "export TURNKEEP_API_KEY=tk-secret", "0001"):
        assert said in text
    assert "curl http://127.0.0.1:8080/v1/chat/completions" in text
    assert f"{DEMO_MODEL} is a demonstration" in text
    assert "--model NAME_OR_FOLDER" in text
    assert "--upstream http://HOST:8000" in text


def test_the_greeting_of_a_later_run_shows_no_key_and_of_an_upstream_no_demonstration() -> None:
    later = greeting(Settings(host="0.0.0.0"), ("0.0.0.0", 8080), None, "0001")
    assert "$TURNKEEP_API_KEY" in later
    assert "http://127.0.0.1:8080" in later
    other = greeting(Settings(upstreams=({"url": "http://gpu:8000"},), auth=False), ("::1", 8080), None, "0001")  # type: ignore[arg-type]
    assert "gpu:8000" in other
    assert "demonstration" not in other
    assert "Authorization" not in other
    assert "http://[::1]:8080" in other


def test_a_turns_last_line_tells_tokens_cached_tokens_and_ttft() -> None:
    usage = {"prompt_tokens": 1200, "output_tokens": 11, "cached_tokens": 1100}
    end = {"type": "session.turn.completed", "turn": {"status": "completed", "usage": usage}}
    assert turn_summary(end, 0.25, 1.25) == (
        "1,200 prompt tokens, 1,100 of them cached · 11 answered · TTFT 250 ms · 10.0 tokens/s"
    )
    broken = {"turn": {"status": "incomplete", "usage": {}, "error": {"message": "the replica died"}}}
    assert turn_summary(broken, None, 1.0) == "incomplete: the replica died"


def test_a_table_leaves_out_what_no_row_tells_and_times_are_read_by_people() -> None:
    assert filled([("a", "", 0, None), ("b", None, 1, "why")]) == [0, 2, 3]
    assert moment(1796052832.492) == "2026-11-30 15:33:52.492"


def test_only_text_is_shown_of_a_stream_and_its_end_is_seen() -> None:
    assert event_text({"type": "response.output_text.delta", "delta": "hi"}) == "hi"
    assert event_text({"type": "session.turn.started", "turn": {}}) == ""
    assert event_end({"type": "response.output_text.delta", "delta": "hi"}) is None
    assert event_end({"type": "session.turn.failed", "turn": {}}) is not None


def test_a_turn_is_one_line_whatever_its_items_hold() -> None:
    turn = {
        "input": [{"type": "message", "role": "user", "content": "hello"}],
        "output": [{"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "x" * 300}]}],
    }
    line = turn_line(turn)
    assert line.startswith("user: hello | assistant: xxx")
    assert len(line) == 200


def test_a_compaction_is_told_in_one_line() -> None:
    report = {"tokens_before": 6000, "tokens_after": 3000}
    made = {"status": "committed", "id": "cmp_1", "plan": {}, "report": report, "error": None}
    assert compaction_line(made) == "committed cmp_1; 6,000 -> 3,000 tokens"
    numbers = {"tokens_before": 900, "tokens_after": 900}
    assert compaction_line({"status": "skipped", "reason": "nothing", "plan": numbers}).startswith(
        "skipped: nothing; 9"
    )
    none = {"status": "skipped", "reason": "no_turns", "message": "there is no turn yet", "plan": {}}
    assert compaction_line(none) == "skipped: no_turns, there is no turn yet"
    failed = {**made, "status": "failed", "error": {"code": "cancelled", "message": "it ended"}, "report": {}}
    assert compaction_line(failed) == "failed cmp_1: cancelled, it ended"
