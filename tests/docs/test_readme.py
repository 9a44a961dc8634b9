"""The command blocks of README.md and docs/: what they name is there. Long ones are run by the tests that own them.

A fenced block marked `console` holds commands after `$ `: `make WORD`, with words of the Makefile; `turnkeep ...`, with
commands and options that exist; pip, curl and python lines. Another command needs a way to check it, added here.
"""

import json
import re
import shlex
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest

from tests.docs.test_commands_documented import COMMANDS

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
MAKE_VARIABLES = {"ARGS", "TORCH_INDEX", "PYTHON"}
BLOCK = re.compile(r"^```console\n(.*?)^```", re.MULTILINE | re.DOTALL)


def commands(page: Path) -> list[str]:
    blocks = "".join(BLOCK.findall(page.read_text())).replace("\\\n", " ")
    return [line[2:].strip() for line in blocks.splitlines() if line.startswith("$ ")]


LINES = [(page.relative_to(ROOT).as_posix(), line) for page in PAGES for line in commands(page)]


def test_the_readme_names_the_two_commands() -> None:
    assert {"make serve", "make test"} <= set(commands(ROOT / "README.md"))


@pytest.mark.parametrize(("page", "line"), LINES)
def test_a_command_of_the_docs_is_one_that_exists(page: str, line: str) -> None:
    words = shlex.split(line.partition(" #")[0])
    while "=" in words[0]:  # VARIABLE=value before the command
        words = words[1:]
    match words[0]:
        case "make":
            check_make(words[1:])
        case "turnkeep":
            check_turnkeep(words[1:])
        case "curl":
            check_curl(words)
        case "pip" | "export" | "python":
            assert len(words) > 1
        case other:
            pytest.fail(f"{page}: say in tests/docs/test_readme.py how `{other}` is checked")


def check_curl(words: list[str]) -> None:
    """A body has the type that its route takes, and what is not written out was printed by `turnkeep serve`."""
    headers = [word for before, word in pairwise(words) if before in ("-H", "--header")]
    sent = [word for before, word in pairwise(words) if before in ("-d", "--data", "--data-binary")]
    assert {word for line in words for word in re.findall(r"\$\w+", line)} <= {"$TURNKEEP_API_KEY"}
    if sent:
        (kind,) = (header.partition(": ")[2] for header in headers if header.lower().startswith("content-type:"))
        assert kind == ("application/x-ndjson" if "import" in words[2] else "application/json")
        if kind == "application/json":
            assert isinstance(json.loads(sent[0]), dict)


def test_the_readme_leads_to_every_page() -> None:
    linked = set(re.findall(r"\]\((docs/[^)#]+)", (ROOT / "README.md").read_text()))
    assert linked >= {page.relative_to(ROOT).as_posix() for page in PAGES[1:]} - {"docs/log.md"}


def check_make(words: list[str]) -> None:
    variables = [word.partition("=") for word in words if "=" in word]
    assert {name for name, _, _ in variables} <= MAKE_VARIABLES
    targets = [word for word in words if "=" not in word]
    dry = subprocess.run(["make", "-n", *targets], cwd=ROOT, capture_output=True, text=True, check=False)
    assert dry.returncode == 0, dry.stderr
    for name, _, value in variables:
        if name == "ARGS" and targets == ["serve"]:
            check_turnkeep(["serve", *shlex.split(value)])


def check_turnkeep(words: list[str]) -> None:
    name = next(
        (
            known
            for known in sorted(COMMANDS, key=len, reverse=True)
            if f"turnkeep {' '.join(words)} ".startswith(known + " ")
        ),
        None,
    )
    assert name, f"there is no command turnkeep {' '.join(words)}"
    known = {option for parameter in COMMANDS[name].params for option in parameter.opts} | {"--help"}
    assert {word.partition("=")[0] for word in words if word.startswith("--")} <= known


def test_links_between_the_pages_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
