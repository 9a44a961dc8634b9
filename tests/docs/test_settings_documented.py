"""docs/settings.md lists every setting with its variable, its default and its meaning, and nothing else."""

import re
from pathlib import Path

import pytest

from gateway.settings import Settings

PAGE = Path(__file__).parents[2] / "docs" / "settings.md"
TOLD_IN_WORDS = {"database_url", "gateway_name", "compaction"}  # the default is worked out at the start


def row(name: str) -> str:
    """The line of docs/settings.md for one setting."""
    field = Settings.model_fields[name]
    default = "" if name in TOLD_IN_WORDS or field.default in (None, (), {}) else str(field.default)
    return f"| `{name}` | `TURNKEEP_{name.upper()}` | {f'`{default}`' if default else ''} | {field.description} |"


@pytest.mark.parametrize("name", Settings.model_fields)
def test_a_setting_stands_in_the_docs_with_default_and_meaning(name: str) -> None:
    assert row(name) in PAGE.read_text().splitlines(), f"put this line into docs/settings.md:\n{row(name)}"


def test_the_docs_name_no_setting_that_is_not_there() -> None:
    listed = re.findall(r"^\| `(\w+)` \| `TURNKEEP_", PAGE.read_text(), re.MULTILINE)
    assert listed == list(Settings.model_fields)


@pytest.mark.parametrize("name", Settings.model_fields)
def test_a_setting_says_what_it_is(name: str) -> None:
    assert len(Settings.model_fields[name].description or "") > 15
