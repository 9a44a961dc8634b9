"""Odd requests at every route of the description, with every kind of key: each is answered or cut off in time, never by
a 5xx, in the shape that every answer has; afterwards the database is whole and the gateway as large as before."""

from __future__ import annotations

import json
import os
import random
import re
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from zlib import crc32

import httpx
import orjson
import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from bench.processes import python, started
from gateway.api.wire import BoundedHttp
from gateway.app import create_app
from gateway.settings import Settings
from tests.faults.processes import machine
from tests.gateway.served import served
from tests.security.fuzzed import WITHIN_S, Subject, consistent
from tests.security.good_bodies import BODIES
from tests.security.odd_requests import Operation, operations, requests

PAUSE_S = 2.0  # what comes more slowly is given up
TOGETHER = 10  # requests for one route, one after the other
LONG = int(os.environ.get("TURNKEEP_TEST_FUZZ", "27"))  # times that: 20,520 requests
WARM, ROUND = 4, 3  # memory is looked at after so many times
RESULT = Path(__file__).parents[2] / "bench" / "results" / "fuzz.json"
GROWN_MIB = 48.0  # what a gateway may have gained over them; half of it over the second half
CALM = list(HealthCheck)
OPERATIONS = operations(create_app(Settings(auth=False)).openapi(), BODIES)


@contextmanager
def engine_process(folder: Path) -> Iterator[str]:
    """Its URL."""
    command = python("gateway.cli", "engine", "--model", "echo", "--port", "0", "--exit-with-parent")
    with started(command, folder=folder, ready='"event":"ready"') as running:
        line = next(line for line in running.said.splitlines() if '"event":"ready"' in line)
        yield str(orjson.loads(line)["url"])


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with engine_process(tmp_path_factory.mktemp("engine")) as url:
        yield url


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory, engine: str) -> Iterator[Subject]:
    """In this process, where coverage sees it."""
    folder = tmp_path_factory.mktemp("fuzz")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BoundedHttp, "headers_s", PAUSE_S)
        with served(folder, auth=True, body_timeout_s=PAUSE_S) as running:
            admin = running.key(scopes=frozenset({"admin"}))
            found = Subject(
                running.address, running.client, folder / "turnkeep.db", engine, keys_of(running.client, admin)
            )
            found.settle()
            yield found
            consistent(found)


def keys_of(client: httpx.Client, admin: dict[str, str]) -> dict[str, dict[str, str]]:
    """A header with a key of each kind, made with the admin's, which `client` sends from now on."""
    client.headers.update(admin)
    found: dict[str, dict[str, str]] = {"admin": admin, "none": {}}
    for kind, scopes in {"user": ["chat", "sessions"], "read": ["read"]}.items():
        answer = client.post("/admin/v1/keys", json={"scopes": scopes})
        assert answer.status_code == 201, answer.text
        found[kind] = {"authorization": f"Bearer {answer.json()['key']}"}
    return found


@pytest.fixture(scope="module")
def long_subject(tmp_path_factory: pytest.TempPathFactory, engine: str) -> Iterator[Subject]:
    """A process of its own, whose memory is its own."""
    folder = tmp_path_factory.mktemp("long-fuzz")
    with engine_process(folder) as own:
        environ = {
            "TURNKEEP_DATA_DIR": str(folder),
            "TURNKEEP_BODY_TIMEOUT_S": str(PAUSE_S),
            "TURNKEEP_LOG_LEVEL": "error",
            "TURNKEEP_UPSTREAMS": orjson.dumps([{"url": own, "name": "echo", "kind": "turnkeep"}]).decode(),
        }
        command = python("gateway.cli", "serve", "--port", "0")
        with started(command, folder=folder, ready=r"tk-\S+", environ=environ) as running:
            at = re.search(r"http://([\d.]+):(\d+)", running.said)
            key = re.search(r"tk-[\w-]+", running.said)
            assert at is not None, running.said
            assert key is not None, running.said
            with httpx.Client(base_url=at[0], timeout=WITHIN_S, trust_env=False) as client:
                keys = keys_of(client, {"authorization": f"Bearer {key[0]}"})
                found = Subject((at[1], int(at[2])), client, folder / "turnkeep.db", engine, keys)
                found.rss_mib = running.rss_mib
                found.settle()
                yield found


def fuzz(subject: Subject, operation: Operation, *, seeded: int) -> None:
    """`TOGETHER` requests. Hypothesis draws that many anew before it begins to vary what it has drawn."""

    @seed(seeded + crc32(str(operation).encode()))
    @settings(
        max_examples=TOGETHER,
        deadline=None,
        database=None,
        suppress_health_check=CALM,
        phases=[Phase.generate, Phase.shrink],
        print_blob=True,
    )
    @given(st.data())
    def each(data: st.DataObject) -> None:
        subject.send(data.draw(requests(operation, keys=subject.keys, named=subject.named)))

    each()


def test_every_route_that_takes_a_body_has_a_good_one() -> None:
    taking = {(operation.method, operation.template) for operation in OPERATIONS if operation.media is not None}
    assert taking == set(BODIES)


@pytest.mark.parametrize("operation", [o for o in OPERATIONS if o.body is not None], ids=str)
def test_the_bodies_that_are_changed_are_taken(subject: Subject, operation: Operation) -> None:
    lines = operation.body if isinstance(operation.body, list) else [operation.body]
    content = subject.named("\n".join(orjson.dumps(line).decode() for line in lines))
    headers = {"content-type": str(operation.media), "if-match": "*"}
    answer = subject.client.request(
        operation.method, subject.named(operation.template), content=content, headers=headers
    )
    subject.renew(operation.template)
    if operation.template == "/admin/v1/tenants" and answer.status_code == 409:
        assert answer.json()["error"]["code"] == "tenant_exists"  # an odd request made it before; tenants stay
    elif operation.template in ("/v1/embeddings", "/v1/rerank"):
        assert answer.json()["error"]["code"] == "route_not_served"  # EchoEngine has neither
    else:
        assert answer.is_success, answer.text


@pytest.mark.parametrize("operation", OPERATIONS, ids=str)
def test_odd_requests_are_answered_or_refused(subject: Subject, operation: Operation) -> None:
    fuzz(subject, operation, seeded=0)
    assert subject.client.get("/livez").status_code == 200


@pytest.mark.prove
@pytest.mark.timeout(3600)
def test_twenty_thousand_odd_requests_leave_a_gateway_as_large_as_it_was(long_subject: Subject) -> None:
    """The first round is to warm up: compiled statements, proven templates, remembered keys."""
    start = random.randrange(1 << 30)
    for number in range(WARM):
        for operation in OPERATIONS:
            fuzz(long_subject, operation, seeded=start - number)
    long_subject.statuses.clear()
    rss_mib = [long_subject.rss_mib()]
    found = []
    for number in range(LONG):
        for operation in OPERATIONS:
            try:
                fuzz(long_subject, operation, seeded=start + number)
            except (AssertionError, BaseExceptionGroup) as error:  # the other routes are tried yet
                found.append("".join(traceback.format_exception_only(error))[:4000])
        if (number + 1) % ROUND == 0:
            rss_mib.append(long_subject.rss_mib())
    assert not found, "\n\n".join(found)
    consistent(long_subject)
    sent = sum(sum(count.values()) for count in long_subject.statuses.values())
    taken = {name for name, count in long_subject.statuses.items() if any(status.startswith("2") for status in count)}
    result = {
        "requests": sent,
        "seed": start,
        "by_status": dict(sorted(sum(long_subject.statuses.values(), Counter()).items())),
        "routes": len(OPERATIONS),
        "routes_that_also_answered_2xx": len(taken),
        "rss_mib_by_round": [round(value, 1) for value in rss_mib],
        "machine": machine(),
    }
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    assert sent == TOGETHER * LONG * len(OPERATIONS)
    assert len(taken) >= 0.75 * len(OPERATIONS), "most were refused at the door: the fuzz says little of what is behind"
    assert rss_mib[-1] - rss_mib[0] < GROWN_MIB, result
    assert rss_mib[-1] - rss_mib[len(rss_mib) // 2] < GROWN_MIB / 2, f"it does not stop growing: {result}"
