"""Rows as CSV that a spreadsheet may open: no cell that came from a client is read as a formula."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence

CSV = "text/csv; charset=utf-8"
FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n", "|", "%")


def plain_cell(value: object) -> object:
    """Text that would begin a formula gets an apostrophe in front, which spreadsheets do not show."""
    if isinstance(value, str) and value.lstrip(" ").startswith(FORMULA):
        return "'" + value
    return "" if value is None else value


def csv_of(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> bytes:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\r\n")  # RFC 4180
    writer.writerow(columns)
    writer.writerows([plain_cell(value) for value in row] for row in rows)
    return out.getvalue().encode()
