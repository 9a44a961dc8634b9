"""schemathesis against the gateway on a real socket: no 5xx, and nothing that the description does not say."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, settings
from schemathesis import Case
from schemathesis.openapi.loaders import from_dict

from gateway.app import create_app
from gateway.settings import Settings
from tests.gateway.served import Served, served

QUICK = int(os.environ.get("TURNKEEP_TEST_EXAMPLES", "4"))
LONG = 400
CALM = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much, HealthCheck.large_base_example]

description = create_app(Settings(auth=False)).openapi()
for path in ("/admin/v1/live", "/v1/sessions/{session_id}/compactions/stream"):  # streams that do not end by themselves
    description["paths"].pop(path)
# What a schema cannot say is refused, too (a cursor made elsewhere, a NUL in text, roles that do not fit): then the
# answer is one of these, never another.
REFUSALS = ["2xx", "400", "404", "409", "412", "413", "422", "428"]
# A value that is too long for its schema may be too long for a request line, too.
REJECTIONS = ["400", "401", "403", "404", "405", "406", "409", "413", "415", "422", "428", "429", "431", "5xx"]
CHECKS = {
    "positive_data_acceptance": {"expected-statuses": REFUSALS},
    "negative_data_rejection": {"expected-statuses": REJECTIONS},
}
# The cases that try each keyword of each schema are made while tests are collected, in a quarter of a minute.
EVERY_KEYWORD = "TURNKEEP_TEST_KEYWORDS" in os.environ  # `make prove` sets it
schema = from_dict(
    description,
    config=schemathesis.Config.from_dict({"checks": CHECKS, "phases": {"coverage": {"enabled": EVERY_KEYWORD}}}),
)


@schemathesis.serializer("application/x-ndjson")
def lines(context: schemathesis.SerializationContext, value: object) -> bytes:
    return value.encode("utf-8", "replace") if isinstance(value, str) else json.dumps(value).encode()


KEY: dict[str, str] = {}  # of the gateway that runs; schemathesis asks for it, and leaves it away to see a 401


@schema.auth()
class Keyed:
    def get(self, case: Case, context: schemathesis.AuthContext) -> dict[str, str]:
        return dict(KEY)

    def set(self, case: Case, data: dict[str, str], context: schemathesis.AuthContext) -> None:
        case.headers.update(data)


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("schemathesis"), auth=True) as running:
        KEY.update(running.key(scopes=frozenset({"admin"})))
        yield running
        KEY.clear()


@schema.parametrize()
@settings(max_examples=QUICK, deadline=None, suppress_health_check=CALM, phases=[Phase.explicit, Phase.generate])
def test_the_gateway_does_what_it_describes(case: Case, gateway: Served) -> None:
    case.call_and_validate(base_url=gateway.url, timeout=20)


@pytest.mark.prove
@schema.parametrize()
@settings(max_examples=LONG, deadline=None, suppress_health_check=CALM, phases=[Phase.explicit, Phase.generate])
def test_the_same_at_length(case: Case, gateway: Served) -> None:
    case.call_and_validate(base_url=gateway.url, timeout=20)
