"""A replica as somebody named it: where it is, as whom to ask it, how long to wait for it. Knows no replica's state."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from engines.contract import Engine
from engines.remote.connect import Kind, connect
from engines.remote.http import Timeouts
from engines.remote.kv_feed import FeedAddress
from engines.remote.stand_in import StandIn
from gateway.fleet.addresses import refusal
from gateway.fleet.queue import ReplicaQueue
from gateway.fleet.replica import Replica, Source
from gateway.settings import Settings
from gateway.upstream import UpstreamAddress


@dataclass(frozen=True, slots=True)
class Member:
    """`kind` None: asked of the replica itself. Equal members are the same replica under the same terms."""

    name: str
    url: str
    kind: Kind | None = None
    api_key: str | None = field(default=None, repr=False)
    timeouts: Timeouts = field(default_factory=Timeouts)
    max_in_flight: int | None = None
    max_waiting: int = 1024
    max_wait_s: float = 60.0
    source: Source = "settings"
    revision: str | None = None  # names the weights of what it serves, as the operator says
    fallback: bool = False
    models: tuple[tuple[str, str], ...] = ()  # of a fallback: names here, and what to ask for there
    kv: FeedAddress | None = None  # where it publishes KV events, if the operator says
    anywhere: bool = True  # False: only where a replica that was added at runtime may be (gateway/fleet/addresses.py)

    async def connected(self) -> Engine:
        """The engine there. Raises EngineError where nothing answers as one."""
        engine = await connect(
            self.url,
            api_key=self.api_key,
            name=self.name,
            kind=self.kind,
            timeouts=self.timeouts,
            refuse_address=None if self.anywhere else refusal,
            kv=self.kv,
        )
        return StandIn(engine, dict(self.models)) if self.fallback else engine

    def replica(self, engine: Engine) -> Replica:
        queue = ReplicaQueue(self.name, max_waiting=self.max_waiting, max_wait_s=self.max_wait_s, clock=time.monotonic)
        return Replica(
            engine,
            self.url,
            queue=queue,
            source=self.source,
            revision=self.revision,
            fallback=self.fallback,
            max_in_flight=self.max_in_flight,
        )


def upstream_member(settings: Settings, upstream: UpstreamAddress, *, source: Source = "settings") -> Member:
    """What it leaves open is as the settings say."""
    key = upstream.api_key.get_secret_value() if upstream.api_key is not None else None
    kind = None if upstream.kind == "auto" else upstream.kind
    return member_of(settings, upstream.name, upstream.url, kind=kind, api_key=key, terms=upstream, source=source)


def member_of(
    settings: Settings,
    name: str,
    url: str,
    *,
    kind: Kind | None = None,
    api_key: str | None = None,
    terms: UpstreamAddress | None = None,
    source: Source = "settings",
) -> Member:
    own: UpstreamAddress | Settings = terms or settings
    return Member(
        name,
        url,
        kind,
        api_key,
        Timeouts(
            connect_s=own.connect_timeout_s or settings.connect_timeout_s,
            first_delta_s=own.first_delta_timeout_s or settings.first_delta_timeout_s,
            idle_s=own.idle_timeout_s or settings.idle_timeout_s,
            total_s=own.total_timeout_s or settings.total_timeout_s,
        ),
        own.max_in_flight or settings.max_in_flight,
        settings.queue_max_waiting if own.queue_max_waiting is None else own.queue_max_waiting,
        own.queue_timeout_s or settings.queue_timeout_s,
        source,
        revision=terms.revision if terms is not None else None,
        fallback=terms is not None and terms.fallback,
        models=tuple(terms.models.items()) if terms is not None else (),
        kv=terms.feed_address() if terms is not None else None,
        anywhere=source == "settings" or settings.link_local_replicas,
    )
