"""Settings: four sources, one order, and what is wrong is told with its place."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from engines.remote.kv_feed import FeedAddress
from gateway.configure import SettingsError, load_settings
from gateway.settings import Settings


def written(folder: Path, text: str) -> Path:
    path = folder / "turnkeep.toml"
    path.write_text(text)
    return path


def problems(environ: dict[str, str] | None = None, **kwargs: object) -> list[str]:
    with pytest.raises(SettingsError) as caught:
        load_settings(environ=environ or {}, **kwargs)  # type: ignore[arg-type]
    return caught.value.problems


def test_command_line_beats_variable_beats_file_beats_default(tmp_path: Path) -> None:
    path = written(tmp_path, "port = 1\nlease_s = 7.0\nhost = '127.0.0.2'\n")
    settings = load_settings({"port": 3}, environ={"TURNKEEP_PORT": "2", "TURNKEEP_LEASE_S": "8"}, config=path)
    assert (settings.port, settings.lease_s, settings.host, settings.grace_s) == (3, 8.0, "127.0.0.2", 30.0)
    source = {line.name: line.source for line in settings.explain()}
    assert source["port"] == "--port"
    assert source["lease_s"] == "TURNKEEP_LEASE_S"
    assert source["host"] == f"{path}:3"
    assert source["grace_s"] == "default"


def test_the_file_of_the_working_folder_is_read_unless_another_is_named(tmp_path: Path) -> None:
    written(tmp_path, "port = 1\n")
    other = tmp_path / "other.toml"
    other.write_text("port = 2\n")
    assert load_settings(environ={}, folder=tmp_path).port == 1
    assert load_settings(environ={"TURNKEEP_CONFIG": str(other)}, folder=tmp_path).port == 2
    assert load_settings(environ={"TURNKEEP_CONFIG": "no.toml"}, config=other, folder=tmp_path).port == 2


def test_a_file_that_is_named_and_not_there_is_an_error(tmp_path: Path) -> None:
    [problem] = problems(config=tmp_path / "no.toml")
    assert "no.toml: there is no such file" in problem


def test_settings_made_in_code_read_no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TURNKEEP_PORT", "1")
    assert Settings().port == 8080


def test_settings_are_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        Settings().port = 1  # type: ignore[misc]


def test_an_unknown_key_is_told_with_its_line_and_the_nearest_name(tmp_path: Path) -> None:
    path = written(tmp_path, "port = 1\n\nprot = 2\n")
    assert problems(config=path) == [f"{path}:3: there is no setting 'prot'; did you mean port?"]


def test_an_unknown_variable_is_told_with_the_nearest_name() -> None:
    assert problems({"TURNKEEP_LEASES": "5"}) == [
        "TURNKEEP_LEASES: there is no such setting; did you mean TURNKEEP_LEASE_S?"
    ]


def test_the_variables_that_kubernetes_sets_for_a_service_are_not_settings() -> None:
    environ = {
        "TURNKEEP_PORT": "tcp://10.0.0.1:8080",
        "TURNKEEP_SERVICE_HOST": "10.0.0.1",
        "TURNKEEP_PORT_8080_TCP": "tcp://10.0.0.1:8080",
    }
    assert load_settings(environ=environ).port == 8080


def test_a_wrong_type_is_told_with_file_and_line(tmp_path: Path) -> None:
    path = written(tmp_path, 'lease_s = 5.0\nport = "eighty"\nengine_threads = true\n')
    first, second = problems(config=path)
    assert first.startswith(f"{path}:2: port: ")
    assert "'eighty'" in first
    assert second.startswith(f"{path}:3: engine_threads: true and false are no value here")


def test_a_wrong_key_inside_an_upstream_is_told_with_its_place(tmp_path: Path) -> None:
    path = written(tmp_path, 'port = 1\n[[upstreams]]\nurl = "http://x:1"\napi_kee = "hush"\n')
    [problem] = problems(config=path)
    assert problem.startswith(f"{path}:4: upstreams[0].api_kee: ")
    assert "did you mean api_key?" in problem


def test_a_wrong_key_of_a_table_is_told_with_its_line_and_the_nearest_name(tmp_path: Path) -> None:
    lines = ["[compaction]", "keep_last = 2", "keep_frist = 1", "[tenant_compaction.acme]", "keep_last = 0", "x = 1"]
    first, second, third = problems(config=written(tmp_path, "\n".join(lines)))
    assert ":3: compaction.keep_frist: there is no such key; did you mean keep_first?" in first
    assert ":5: tenant_compaction.acme.keep_last: " in second
    assert ":6: tenant_compaction.acme.x: there is no such key; docs/compaction.md lists them" in third
    two = '[[upstreams]]\nurl = "http://x:1"\n[[upstreams]]\nurl = "http://y:1"\nkynd = "vllm"\n'
    [problem] = problems(config=written(tmp_path, two))
    assert ":5: upstreams[1].kynd: there is no such key; did you mean kind?" in problem
    [problem] = problems(config=written(tmp_path, "port = 1\ncompaction = {keep_lsat = 1}\n"))
    assert ":2: compaction.keep_lsat: there is no such key; did you mean keep_last?" in problem


def test_what_is_not_toml_is_told_with_its_line(tmp_path: Path) -> None:
    [problem] = problems(config=written(tmp_path, "port = 1\nhost = \n"))
    assert "turnkeep.toml:2: not TOML" in problem


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("PORT", "99999"),
        ("LEASE_S", "nan"),
        ("LEASE_S", "-1"),
        ("TRIGGER_RATIO", "1.5"),
        ("ENGINE_BLOCK_SIZE", "48"),
        ("UPSTREAMS", "localhost:8000"),
        ("UPSTREAMS", "http://user:pass@x:1"),
        ("UPSTREAMS", "http://x:1,http://x:1/v1"),
        ("TOKENIZERS", "model"),
        ("DATABASE_URL", "mysql://x"),
        ("SECRET", "short"),
        ("GATEWAY_NAME", "a/b"),
        ("ON_DISCONNECT", "cancel"),
    ],
)
def test_a_value_out_of_bounds_is_refused_with_the_variable(variable: str, value: str) -> None:
    [problem] = problems({f"TURNKEEP_{variable}": value})
    assert problem.startswith(f"TURNKEEP_{variable}: ")


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"host": "0.0.0.0", "auth": False}, "turn auth on"),
        ({"lease_s": 1.0}, "at most half"),
    ],
)
def test_settings_that_do_not_fit_together_are_refused(given: dict[str, object], why: str) -> None:
    [problem] = problems(command_line=given)
    assert why in problem


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "127.8.8.8"])
def test_auth_may_be_off_on_loopback(host: str) -> None:
    assert not Settings(host=host, auth=False).auth


def test_upstreams_come_from_text_tables_and_json(tmp_path: Path) -> None:
    text = load_settings(environ={"TURNKEEP_UPSTREAMS": "http://a:1, https://b/v1"})
    assert [(u.url, u.name) for u in text.upstreams] == [("http://a:1", "a:1"), ("https://b", "b")]
    assert not text.embedded
    json = load_settings(environ={"TURNKEEP_UPSTREAMS": '[{"url": "http://a:1", "api_key": "k", "kind": "vllm"}]'})
    assert json.upstreams[0].api_key is not None
    table = load_settings(environ={}, config=written(tmp_path, '[[upstreams]]\nurl = "http://a:1"\nname = "gpu"\n'))
    assert table.upstreams[0].name == "gpu"
    assert Settings().embedded


def test_an_upstream_says_where_its_kv_events_are(tmp_path: Path) -> None:
    entry = 'url = "http://a:1"\nkv_events = "tcp://a:5557"\nkv_replay = "tcp://a:5600"\nkv_ranks = 2\n'
    found = load_settings(environ={}, config=written(tmp_path, f"[[upstreams]]\n{entry}")).upstreams[0]
    assert found.feed_address() == FeedAddress("tcp://a:5557", "tcp://a:5600", ranks=2)
    assert load_settings(environ={"TURNKEEP_UPSTREAMS": "http://a:1"}).upstreams[0].feed_address() is None


@pytest.mark.parametrize(
    "wrong", ['"kv_events": "http://a:1"', '"kv_events": "tcp://*:1"', '"kv_replay": "tcp://a:1"', '"kv_ranks": 2']
)
def test_kv_events_that_cannot_be_read_are_refused(wrong: str) -> None:
    [problem] = problems({"TURNKEEP_UPSTREAMS": f'[{{"url": "http://a:1", {wrong}}}]'})
    assert "kv_events" in problem or "KV events" in problem


@pytest.mark.parametrize(
    "wrong", ["*", "https://a.example/", "a.example", "https://a.example/x", "ftp://a", "https://", "null"]
)
def test_an_origin_that_no_browser_would_send_is_refused(wrong: str) -> None:
    [problem] = problems({"TURNKEEP_CORS_ORIGINS": f"https://good.example:8443,{wrong}"})
    assert "is no origin" in problem
    assert wrong in problem
    assert Settings(cors_origins=("https://good.example:8443",)).cors_origins == ("https://good.example:8443",)


def test_a_model_of_the_command_line_takes_no_folder_meant_for_another() -> None:
    environ = {"TURNKEEP_MODEL_DIR": "/models/demo"}
    assert load_settings(environ=environ).model_dir == Path("/models/demo")
    assert load_settings({"model": "/models/other"}, environ=environ).model_dir is None


def test_secrets_are_masked_wherever_settings_are_shown() -> None:
    settings = load_settings(
        {"upstreams": [{"url": "http://a:1", "api_key": "hush-upstream"}]},
        environ={"TURNKEEP_SECRET": "hush-secret" * 4, "TURNKEEP_DATABASE_URL": "postgresql://me:hush-db@host/x"},
    )
    shown = repr(settings) + str(settings) + "".join(line.value for line in settings.explain())
    assert "hush" not in shown
    assert "postgresql://me:********@host/x" in shown


def test_a_wrong_secret_is_not_shown() -> None:
    assert "hush" not in problems({"TURNKEEP_SECRET": "hush"})[0]
