"""What routes need of the gateway, wired once in `gateway.app` and found on the application."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from starlette.requests import Request

if TYPE_CHECKING:
    from collections.abc import Callable

    from gateway.api.access import Access
    from gateway.api.responses.ids import ResponseIds
    from gateway.api.responses.sealed import ContentSeal
    from gateway.fleet.fleet import Fleet
    from gateway.fleet.roster import Roster
    from gateway.sessions.models import Models
    from gateway.sessions.places import Places
    from gateway.sessions.registry import Registry
    from gateway.sessions.room import TurnRoom
    from gateway.settings import Settings
    from gateway.store.sessions import Store


@dataclass(frozen=True, slots=True)
class Gateway:
    settings: Settings
    store: Store
    fleet: Fleet
    roster: Roster
    seal: Callable[[str, str], bytes]  # (an API key of another server, what for) -> as it is stored
    models: Models
    registry: Registry
    room: TurnRoom
    access: Access
    clock: Callable[[], float]
    new_id: Callable[[str], str]
    places: Places
    subject_of: Callable[[str, str], str]  # (tenant, end user) -> what a receipt names the user by
    key_id_of: Callable[[str, str], str]  # (tenant, idempotency key) -> the session id made for it
    response_ids: ResponseIds
    content_seal: ContentSeal


def gateway_of(request: Request) -> Gateway:
    gateway: Gateway = request.app.state.gateway
    return gateway
