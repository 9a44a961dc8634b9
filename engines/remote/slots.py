"""Which slot of a llama.cpp server a request goes to, so that two tenants never share a prefix there.

llama.cpp knows no cache salt: whatever a slot computed last is reused by the next prompt that begins alike. So this
side names the slot, and forbids reuse (`fresh`) in one whose last prompt had another salt. A session comes back to
its slot. What others ask of the same server is not known here. Decides only; knows no HTTP.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class _Slot:
    salt: str | None = None  # of our last prompt there; None: what it holds is not known
    session: str | None = None
    used: int = 0  # when, counted in requests
    running: int = 0  # requests that we have there, one of them running


@dataclass(frozen=True, slots=True)
class Seat:
    """A slot taken for one request. `fresh`: nothing of what it holds may be reused."""

    slot: int
    fresh: bool


class SlotTable:
    """The slots of one server, as far as our own requests tell."""

    def __init__(self, slots: int) -> None:
        self._slots = [_Slot() for _ in range(slots)]
        self._requests = 0

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def running(self) -> int:
        return sum(slot.running for slot in self._slots)

    def take(self, salt: str, session: str | None) -> Seat:
        """The session's own slot if it is as idle as any, else one that nobody needs, else the one unused for longest.

        Where all are busy it is one with the fewest requests: the server runs them in order. `give_back` the seat.
        """
        self._requests += 1
        number = min(range(len(self._slots)), key=lambda n: self._cost(self._slots[n], salt, session))
        slot = self._slots[number]
        seat = Seat(number, fresh=slot.salt != salt)
        slot.salt, slot.session, slot.used = salt, session, self._requests
        slot.running += 1
        return seat

    def give_back(self, seat: Seat) -> None:
        self._slots[seat.slot].running -= 1

    def of(self, session: str) -> tuple[int, ...]:
        """The slots that hold this session's last prompt."""
        return tuple(n for n, slot in enumerate(self._slots) if slot.session == session)

    def erased(self, number: int) -> None:
        """The slot holds nothing of anybody."""
        slot = self._slots[number]
        slot.salt = slot.session = None
        slot.used = 0

    @staticmethod
    def _cost(slot: _Slot, salt: str, session: str | None) -> tuple[int, int, int]:
        if session is not None and (slot.salt, slot.session) == (salt, session):
            kinship = 0
        elif slot.session is None and slot.salt in (salt, None):
            kinship = 1
        else:
            kinship = 2
        return slot.running, kinship, slot.used
