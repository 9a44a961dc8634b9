"""The official clients' own flows: against the echo engine, and, at length, against the real small model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from anthropic import Anthropic
from openai import OpenAI

from tests.e2e.client_flows import FLOWS, anthropic_messages
from tests.e2e.test_serve_command import serving
from tests.gateway.served import Served, served


@pytest.fixture(scope="module")
def echo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("flows"), auth=True) as running:
        yield running


@pytest.mark.parametrize("flow", FLOWS, ids=lambda flow: flow.__name__)
def test_the_official_client_against_the_echo_engine(echo: Served, flow: Any) -> None:
    key = echo.key()["authorization"].removeprefix("Bearer ")
    with OpenAI(base_url=f"{echo.url}/v1", api_key=key, max_retries=0) as client:
        flow(client, "echo")


def test_anthropics_client_against_the_echo_engine(echo: Served) -> None:
    key = echo.key()["authorization"].removeprefix("Bearer ")
    with Anthropic(base_url=echo.url, api_key=key, max_retries=0) as client:
        anthropic_messages(client, "echo")


@pytest.mark.prove
@pytest.mark.model
@pytest.mark.timeout(600)
def test_the_official_clients_against_the_real_model(tmp_path: Path, model_dir: Path) -> None:
    with (
        serving(tmp_path, "--model", str(model_dir)) as started,
        OpenAI(base_url=f"{started.url}/v1", api_key=started.key, timeout=300, max_retries=0) as client,
    ):
        model = client.models.list().data[0].id
        for flow in FLOWS:
            flow(client, model)
        with Anthropic(base_url=started.url, api_key=started.key, timeout=300, max_retries=0) as anthropic:
            anthropic_messages(anthropic, model)
