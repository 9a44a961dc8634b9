"""Reads settings from their sources: command line, environment, one TOML file, default, the first that names it.

    load_settings({"port": 8081}, environ=os.environ, config=None)     -> Settings, each value with its source

What is wrong is told with its place (`turnkeep.toml:3`, `TURNKEEP_PORT`, `--port`), all of it at once.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from gateway.policy import CompactionFields
from gateway.prices import Price
from gateway.settings import Settings
from gateway.upstream import UpstreamAddress

CONFIG_FILE = "turnkeep.toml"
PREFIX = "TURNKEEP_"
FLAGS = {"database_url": "--database", "upstreams": "--upstream"}  # where the option has another name
# variables that are no settings: where the file is; what tests and measurements read
OTHER_VARIABLES = frozenset({"TURNKEEP_CONFIG", "TURNKEEP_DATA", "TURNKEEP_MODELS", "TURNKEEP_API_KEY", "TURNKEEP_URL"})
OTHER_PREFIXES = ("TURNKEEP_TEST_", "TURNKEEP_FAILPOINT")
TABLES = {"upstreams": (UpstreamAddress.model_fields, "settings"), "prices": (Price.model_fields, "usage")}
HIDDEN = ("secret", "api_key", "database_url", "limits_storage")  # may hold what nobody is to read
# Kubernetes sets these in every container for a service that is named turnkeep
KUBERNETES = re.compile(r"^TURNKEEP_(SERVICE_|PORT_\d+_)")


class SettingsError(Exception):
    """Settings that cannot be used. `problems`: one line for each, with its place."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


def load_settings(
    command_line: Mapping[str, Any] | None = None,
    *,
    environ: Mapping[str, str],
    config: Path | None = None,
    folder: Path = Path(),
) -> Settings:
    """`config` None: TURNKEEP_CONFIG, else turnkeep.toml in `folder` if there is one. Raises SettingsError."""
    given = {name: value for name, value in (command_line or {}).items() if value is not None}
    path = config or (Path(environ["TURNKEEP_CONFIG"]) if environ.get("TURNKEEP_CONFIG") else None)
    if path is None and (folder / CONFIG_FILE).exists():
        path = folder / CONFIG_FILE
    text, filed = _read_toml(path) if path else ("", {})
    variables, strangers = _read_environ(environ)
    problems = strangers + [
        f"{path}:{_line_of(text, name)}: there is no setting {name!r}{_did_you_mean(name, list(Settings.model_fields))}"
        for name in filed
        if name not in Settings.model_fields
    ]
    if problems:
        raise SettingsError(problems)
    if "model" in given:  # another model than the one whose folder a file or a variable names
        filed.pop("model_dir", None)
        variables.pop("model_dir", None)
    sources = {name: f"{path}:{_line_of(text, name)}" for name in filed}
    sources |= {name: PREFIX + name.upper() for name in variables}
    sources |= {name: FLAGS.get(name, "--" + name.replace("_", "-")) for name in given}
    try:
        settings = Settings(**{**filed, **variables, **given})
    except ValidationError as error:
        raise SettingsError(
            [
                _problem(detail, sources, text)
                for detail in error.errors()
                if detail["type"] != "default_factory_not_called"
            ]
        ) from error
    return settings.said_by(sources)


def _read_toml(path: Path) -> tuple[str, dict[str, Any]]:
    try:
        text = path.read_text(encoding="utf-8")
        return text, tomllib.loads(text)
    except FileNotFoundError:
        raise SettingsError([f"{path}: there is no such file; name another with --config or TURNKEEP_CONFIG"]) from None
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError([f"{path}: cannot be read: {error}"]) from error
    except tomllib.TOMLDecodeError as error:
        at = re.search(r"\(at line (\d+)", str(error))
        raise SettingsError([f"{path}:{at[1] if at else 1}: not TOML: {error}"]) from error


def _read_environ(environ: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """The settings among the variables, and what to say of those that look like settings and are none."""
    settings: dict[str, str] = {}
    strangers = []
    for variable in sorted(environ):
        if not variable.startswith(PREFIX) or variable in OTHER_VARIABLES or variable.startswith(OTHER_PREFIXES):
            continue
        name, value = variable.removeprefix(PREFIX).lower(), environ[variable]
        if KUBERNETES.match(variable) or (name == "port" and value.startswith("tcp://")) or value == "":
            continue
        if name in Settings.model_fields:
            settings[name] = value
        else:
            strangers.append(
                f"{variable}: there is no such setting{_did_you_mean(name, list(Settings.model_fields), PREFIX)}"
            )
    return settings, strangers


def _did_you_mean(name: str, known: list[str], prefix: str = "", page: str = "settings") -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    shown = (prefix + near[0].upper() if prefix else near[0]) if near else ""
    return f"; did you mean {shown}?" if near else f"; docs/{page}.md lists them"


def _line_of(text: str, name: str) -> int:
    """Line of a top-level key or table, counted from 1."""
    quoted = re.escape(name)
    key = re.compile(rf"""^\s*(?:\[\[?\s*)?(?:"{quoted}"|'{quoted}'|{quoted})\s*(?:[=.\]]|$)""")
    return next((number for number, line in enumerate(text.splitlines(), 1) if key.match(line)), 1)


def _line_within(text: str, location: Sequence[str]) -> int | None:
    """Line of a key below a table or within an entry of an array of tables; None where it stands nowhere by itself.

    A table is found by its header, `[a.b]` or the nth `[[a]]`, and the key below it, before the next header.
    """
    *tables, key = [part for part in location if not part.isdigit()]
    nth = next((int(part) for part in location if part.isdigit()), 0)
    here, inside = 0, False  # headers of that table so far
    for number, line in enumerate(text.splitlines(), 1):
        if header := re.match(r"\s*\[\[?([^\]]+)\]", line):
            names = [name.strip().strip("\"'") for name in header[1].split(".")]
            here += names == tables
            inside = names == tables and here == nth + 1
        elif inside and re.match(rf"""\s*["']?{re.escape(key)}["']?\s*=""", line):
            return number
    return None


def _problem(detail: Any, sources: Mapping[str, str], text: str) -> str:
    """One line from one of pydantic's errors: the place, the setting, what is wrong, what was there."""
    location = [str(part) for part in detail["loc"]]
    message = str(detail["msg"]).removeprefix("Value error, ")
    if not location:
        return message
    name = location[0]
    inside = "".join(f"[{part}]" if part.isdigit() else f".{part}" for part in location[1:])
    if detail["type"] == "extra_forbidden":
        fields, page = TABLES.get(name, (CompactionFields.model_fields, "compaction"))
        message = f"there is no such key{_did_you_mean(location[-1], list(fields), page=page)}"
    shown = detail["input"]
    hidden = location[-1] in HIDDEN or not isinstance(shown, str | int | float | bool)
    value = "" if hidden else f" (it is {str(shown)[:80]!r})"
    source = sources.get(name, "default")
    file, _, line = source.rpartition(":")
    if file and line.isdigit() and (within := _line_within(text, location)) is not None:
        source = f"{file}:{within}"
    return f"{source}: {name}{inside}: {message}{value}"
