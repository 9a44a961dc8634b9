"""The order in which tenants take turns: start-time fair queueing. Pure; knows no clock and no event loop.

Each tenant's entries keep their order. The head of a tenant's line carries a start tag; the smallest is served next.

    start of a new line   max(virtual time, the tenant's finish)      who was idle gains nothing by it
    served                virtual time = its start; finish = start + cost
    next in the line      start = finish                              who asks much waits behind who asks little

So over any stretch in which two tenants both wait, what they were served differs by one entry's cost at most, however
many entries either has (Goyal, Vin, Cheng: Start-time Fair Queuing, SIGCOMM 1996). An entry that leaves unserved costs
its tenant nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")

KEPT_IDLE = 1024  # tenants without an entry whose finish is still remembered


@dataclass(slots=True)
class _Line(Generic[T]):
    """One tenant's entries with their costs; `start` is of the first. Ordered: an entry may leave from anywhere."""

    entries: OrderedDict[T, float] = field(default_factory=OrderedDict)
    start: float = 0.0
    finish: float = 0.0


class FairOrder(Generic[T]):
    """Entries are hashable and different from each other. Costs are in any one unit, above 0."""

    def __init__(self) -> None:
        self._lines: dict[str, _Line[T]] = {}
        self._backlogged: dict[str, _Line[T]] = {}  # those of the lines that have entries
        self._virtual = 0.0
        self._size = 0
        self._cost = 0.0

    def __len__(self) -> int:
        return self._size

    @property
    def cost(self) -> float:
        """Of all entries together."""
        return self._cost

    def waiting(self, tenant: str) -> int:
        line = self._lines.get(tenant)
        return 0 if line is None else len(line.entries)

    def push(self, tenant: str, entry: T, cost: float) -> None:
        line = self._lines.setdefault(tenant, _Line())
        if not line.entries:
            line.start = max(self._virtual, line.finish)
            self._backlogged[tenant] = line
        line.entries[entry] = cost
        self._size += 1
        self._cost += cost

    def charge(self, tenant: str, cost: float) -> None:
        """Serve something of a tenant's at once, while nothing waits: as `push` and `pop`."""
        assert not self._size
        line = self._lines.setdefault(tenant, _Line())
        self._virtual = max(self._virtual, line.finish)
        line.start = line.finish = self._virtual + cost
        self._let_go()

    def pop(self) -> T:
        """Serve the next entry. Raises IndexError where none waits."""
        if not self._size:
            raise IndexError("nothing waits")
        tenant, line = min(self._backlogged.items(), key=lambda item: item[1].start)
        entry, cost = line.entries.popitem(last=False)
        self._left(tenant, line, cost)
        self._virtual = line.start
        line.start = line.finish = line.start + cost
        self._let_go()
        return entry

    def discard(self, tenant: str, entry: T) -> bool:
        """An entry leaves unserved; False where it was not there."""
        line = self._lines.get(tenant)
        if line is None or (cost := line.entries.pop(entry, None)) is None:
            return False
        self._left(tenant, line, cost)
        return True

    def longest(self) -> tuple[str, int]:
        """The tenant with the most entries, and how many; ("", 0) where none waits."""
        most = max(((len(line.entries), name) for name, line in self._backlogged.items()), default=(0, ""))
        return most[1], most[0]

    def newest(self, tenant: str) -> T:
        """The last entry of a tenant's line, which has one."""
        return next(reversed(self._lines[tenant].entries))

    def rest(self) -> None:
        """Nobody waits and nobody is served: everyone begins anew."""
        if not self._size:
            self._lines.clear()
            self._virtual = 0.0

    def _left(self, tenant: str, line: _Line[T], cost: float) -> None:
        """One of its entries is gone."""
        self._size -= 1
        self._cost = self._cost - cost if self._size else 0.0
        if not line.entries:
            del self._backlogged[tenant]

    def _let_go(self) -> None:
        """Forget tenants that owe nothing, and where that is not enough those that owe least. Not every time: half of
        them at once."""
        if len(self._lines) <= 2 * KEPT_IDLE:
            return
        idle = sorted((line.finish, name) for name, line in self._lines.items() if not line.entries)
        for place, (finish, name) in enumerate(idle):
            if finish <= self._virtual or place < len(idle) - KEPT_IDLE:
                del self._lines[name]
