"""Names of responses and of items: made of their turn's, so that nothing more is stored.

turn      turn_<32 hex>
response  resp_<32 hex><16 hex>          the check is of the tenant and the turn: nobody else can name it
item      <kind>_<32 hex><i or o><n>     the n-th item of the turn's input; of its output, the n-th of its kind
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from compression.conversation import Item, Turn

TURN = re.compile(r"turn_([0-9a-f]{32})")
RESPONSE = re.compile(r"resp_([0-9a-f]{32})([0-9a-f]{16})")
ITEM = re.compile(r"(?:msg|rs|fc|fco)_([0-9a-f]{32})[io][0-9]{1,5}")
PREFIX = {"message": "msg", "reasoning": "rs", "function_call": "fc", "function_call_output": "fco"}


@dataclass(frozen=True, slots=True)
class ResponseIds:
    """`check`: (tenant, turn) -> 16 hex digits that only this gateway's secret makes."""

    check: Callable[[str, str], str]

    def of_turn(self, tenant_id: str, turn_id: str) -> str:
        return f"resp_{_hex(turn_id)}{self.check(tenant_id, turn_id)}"

    def turn_of(self, tenant_id: str, response_id: str) -> str | None:
        """The turn that this tenant's response is. None: it is no id, or another tenant's."""
        found = RESPONSE.fullmatch(response_id)
        if found is None:
            return None
        turn_id = f"turn_{found[1]}"
        return turn_id if hmac.compare_digest(self.check(tenant_id, turn_id), found[2]) else None


def output_id(turn_id: str, kind: str, n: int) -> str:
    """Of the n-th item of that kind in an answer, from 0: known while the answer still comes."""
    return f"{PREFIX[kind]}_{_hex(turn_id)}o{n}"


def named_input(turn: Turn) -> Iterator[tuple[str, Item]]:
    for n, item in enumerate(turn.input):
        yield f"{PREFIX[item.type]}_{_hex(turn.id)}i{n}", item


def named_output(turn_id: str, output: tuple[Item, ...]) -> Iterator[tuple[str, Item]]:
    seen: dict[str, int] = {}
    for item in output:
        n = seen[item.type] = seen.get(item.type, -1) + 1
        yield output_id(turn_id, item.type, n), item


def named_items(turn: Turn) -> list[tuple[str, Item]]:
    return [*named_input(turn), *named_output(turn.id, turn.output)]


def turn_of_item(item_id: str) -> str | None:
    """None: it is no item's id."""
    found = ITEM.fullmatch(item_id)
    return f"turn_{found[1]}" if found is not None else None


def _hex(turn_id: str) -> str:
    return turn_id.removeprefix("turn_")
