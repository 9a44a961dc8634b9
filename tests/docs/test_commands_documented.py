"""docs/commands.md lists every command and every exit code, and nothing else."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer.main

from gateway.cli import app
from gateway.commands.failure import ExitCode

PAGE = (Path(__file__).parents[2] / "docs" / "commands.md").read_text()


def words(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Every command below `command`, with its full name."""
    below = getattr(command, "commands", None)
    if below is None:
        yield name, command
        return
    for word, part in below.items():
        yield from words(part, f"{name} {word}")


COMMANDS = dict(words(typer.main.get_command(app), "turnkeep"))


def test_every_command_stands_in_the_docs_and_no_other() -> None:
    assert set(re.findall(r"^\| `(turnkeep [^`]+)`", PAGE, re.MULTILINE)) == set(COMMANDS)


def test_every_command_and_option_says_what_it_does() -> None:
    for name, command in COMMANDS.items():
        assert command.help, name
        for parameter in command.params:
            if parameter.name != "help":
                assert getattr(parameter, "help", None), f"{name} {parameter.name}"


def test_every_exit_code_stands_in_the_docs() -> None:
    listed = {int(code) for code in re.findall(r"^\| (\d+) \|", PAGE, re.MULTILINE)}
    assert listed == {0, 1, 2, *(int(code) for code in ExitCode)}


def test_options_named_in_the_docs_are_options() -> None:
    known = {option for command in COMMANDS.values() for parameter in command.params for option in parameter.opts}
    assert set(re.findall(r"`(--[a-z-]+)", PAGE)) <= known
