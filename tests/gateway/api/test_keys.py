"""API keys and tenants by the admin API: made, listed, rotated, revoked, and refused what would lock everybody out."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.gateway.api.refusal import nothing_saved, refused
from tests.gateway.served import Served, served

KEYS, TENANTS, AUDIT = "/admin/v1/keys", "/admin/v1/tenants", "/admin/v1/audit"


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("keys"), auth=True) as running:
        running.client.headers.update(running.key(scopes=frozenset({"admin"})))
        yield running


def made(gateway: Served, **fields: Any) -> dict[str, Any]:
    answer = gateway.client.post(KEYS, json=fields)
    assert answer.status_code == 201, answer.text
    assert answer.headers["cache-control"] == "no-store"
    told: dict[str, Any] = answer.json()
    return told


def shown(gateway: Served, key_id: str) -> dict[str, Any]:
    told: dict[str, Any] = gateway.client.get(f"{KEYS}/{key_id}").json()
    return told


def works(gateway: Served, key: str) -> bool:
    answer = gateway.client.get("/v1/models", headers={"authorization": f"Bearer {key}"})
    assert answer.status_code in (200, 401), answer.text
    return answer.status_code == 200


def newest_line(gateway: Served) -> dict[str, Any]:
    line: dict[str, Any] = gateway.client.get(AUDIT, params={"limit": 1}).json()["data"][0]
    return line


def test_a_key_is_made_and_told_this_once(gateway: Served) -> None:
    told = made(gateway, name="backend", scopes=["read", "chat"], ttl_seconds=60)
    key = told.pop("key")
    assert re.fullmatch(r"tk-[A-Za-z0-9_-]{43}", key)
    assert told["id"] == key[:11]
    assert (told["tenant"], told["scopes"], told["state"]) == ("default", ["chat", "read"], "active")
    assert told["expires_at"] == pytest.approx(told["created_at"] + 60)
    assert works(gateway, key)
    assert {**shown(gateway, told["id"]), "last_used_at": None} == told
    assert key not in gateway.client.get(KEYS).text


def test_keys_are_listed_by_tenant_page_by_page_in_every_state(gateway: Served) -> None:
    gateway.client.post(TENANTS, json={"id": "paged"}).raise_for_status()
    ids = [made(gateway, tenant="paged", name=str(number))["id"] for number in range(5)]
    gateway.client.post(f"{KEYS}/{ids[0]}/revoke").raise_for_status()
    seen: list[tuple[str, str]] = []
    cursor: dict[str, Any] = {}
    while True:
        page = gateway.client.get(KEYS, params={"tenant": "paged", "limit": 2} | cursor).json()
        seen += [(key["id"], key["state"]) for key in page["data"]]
        assert page["has_more"] == (page["next_cursor"] is not None)
        if not page["has_more"]:
            break
        cursor = {"cursor": page["next_cursor"]}
    assert seen == [*((id, "active") for id in reversed(ids[1:])), (ids[0], "revoked")]


def test_a_revoked_key_ends_at_once_and_stays_in_the_list(gateway: Served) -> None:
    told = made(gateway)
    assert works(gateway, told["key"])
    first = gateway.client.post(f"{KEYS}/{told['id']}/revoke", json={"force": False}).json()
    assert first["state"] == "revoked"
    assert not works(gateway, told["key"])
    assert gateway.client.post(f"{KEYS}/{told['id']}/revoke").json() == first
    line = newest_line(gateway)
    assert (line["action"], line["target"], line["outcome"]) == ("key.revoke", told["id"], "done")
    assert line["request_id"].startswith("req_")


def test_a_rotated_key_works_beside_the_new_one_until_its_grace_is_over(gateway: Served) -> None:
    old = made(gateway, name="backend", scopes=["chat"], ttl_seconds=9_000)
    new = gateway.client.post(f"{KEYS}/{old['id']}/rotate", json={"grace_s": 600}).json()
    assert {name: new[name] for name in ("tenant", "name", "scopes", "expires_at", "replaces", "state")} == {
        **{name: old[name] for name in ("tenant", "name", "scopes", "expires_at")},
        "replaces": old["id"],
        "state": "active",
    }
    assert (new["old"]["state"], new["old"]["replaced_by"]) == ("ending", new["id"])
    assert new["old"]["expires_at"] == pytest.approx(new["created_at"] + 600, abs=5)
    assert shown(gateway, old["id"])["replaced_by"] == new["id"]
    assert works(gateway, old["key"])
    assert works(gateway, new["key"])
    line = newest_line(gateway)
    assert line["details"] == {"replaced_by": new["id"], "grace_s": 600, "force": False}


def test_a_new_key_has_the_limits_of_the_one_in_whose_place_it_is(gateway: Served) -> None:
    old, limits = made(gateway), {"requests_per_minute": 7}
    gateway.client.put(f"/admin/v1/limits/default/keys/{old['id']}", json=limits).raise_for_status()
    new = gateway.client.post(f"{KEYS}/{old['id']}/rotate").json()
    told = gateway.client.get(f"/admin/v1/limits/default/keys/{new['id']}").json()
    assert told["limits"]["requests_per_minute"] == 7


def test_the_grace_is_the_setting_s_where_none_is_named(gateway: Served) -> None:
    old = made(gateway)
    new = gateway.client.post(f"{KEYS}/{old['id']}/rotate").json()
    grace_s = gateway.gateway.settings.key_grace_s
    assert new["old"]["expires_at"] == pytest.approx(new["created_at"] + grace_s, abs=5)


def test_a_grace_of_nothing_ends_the_old_key_at_once(gateway: Served) -> None:
    old = made(gateway)
    assert works(gateway, old["key"])
    new = gateway.client.post(f"{KEYS}/{old['id']}/rotate", json={"grace_s": 0}).json()
    assert new["old"]["state"] == "expired"
    assert not works(gateway, old["key"])
    assert works(gateway, new["key"])


def test_what_was_rotated_or_is_over_is_not_rotated(gateway: Served) -> None:
    old = made(gateway)
    new = gateway.client.post(f"{KEYS}/{old['id']}/rotate").json()
    revoked = made(gateway)
    gateway.client.post(f"{KEYS}/{revoked['id']}/revoke").raise_for_status()
    with nothing_saved(gateway):
        error = refused(gateway.client.post(f"{KEYS}/{old['id']}/rotate"), 409, "key_rotated")
        assert new["id"] in error["message"]
        refused(gateway.client.post(f"{KEYS}/{revoked['id']}/rotate"), 409, "key_over")
    line = newest_line(gateway)
    assert (line["action"], line["target"], line["outcome"]) == ("key.rotate", revoked["id"], "key_over")


def test_the_last_admin_key_is_ended_only_by_force_and_the_refusal_is_told(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    with served(tmp_path_factory.mktemp("last"), auth=True) as gateway:
        header = gateway.key(scopes=frozenset({"admin"}))
        key_id = header["authorization"].removeprefix("Bearer ")[:11]
        gateway.client.headers.update(header)
        refused(gateway.client.post(f"{KEYS}/{key_id}/revoke"), 409, "last_admin_key")
        refused(gateway.client.post(f"{KEYS}/{key_id}/rotate", json={"grace_s": 0}), 409, "last_admin_key")
        lines = gateway.client.get(AUDIT).json()["data"]
        assert [(line["action"], line["outcome"]) for line in lines] == [
            ("key.rotate", "last_admin_key"),
            ("key.revoke", "last_admin_key"),
        ]
        other = made(gateway, scopes=["admin"])
        gateway.client.post(f"{KEYS}/{key_id}/revoke").raise_for_status()
        gateway.client.headers["authorization"] = f"Bearer {other['key']}"
        last = gateway.client.post(f"{KEYS}/{other['id']}/revoke", json={"force": True})
        assert last.json()["state"] == "revoked"
        refused(gateway.client.get(KEYS), 401)


@pytest.mark.parametrize("word", ["tk-unknown", "tk-AAAAAAAA", "x", "tk-%00AAAAAA"])
def test_an_unknown_key_is_not_found_and_a_whole_key_is_not_repeated(gateway: Served, word: str) -> None:
    whole = word + "B" * 40
    with nothing_saved(gateway):
        for path in (f"{KEYS}/{word}", f"{KEYS}/{whole}"):
            error = refused(gateway.client.get(path), 404, "key_not_found")
            assert "B" * 12 not in error["message"]
            refused(gateway.client.post(path + "/revoke"), 404, "key_not_found")
            refused(gateway.client.post(path + "/rotate"), 404, "key_not_found")


@pytest.mark.parametrize(
    ("fields", "status", "code", "param"),
    [
        ({"scopes": ["root"]}, 400, "invalid_value", "scopes[0]"),
        ({"scopes": []}, 400, "invalid_value", "scopes"),
        ({"tenant": "a/b"}, 400, "invalid_value", "tenant"),
        ({"tenant": "nobody"}, 404, "tenant_not_found", "tenant"),
        ({"ttl_seconds": 0}, 400, "invalid_value", "ttl_seconds"),
        ({"name": ""}, 400, "invalid_value", "name"),
        ({"digest": "x"}, 400, "unknown_field", "digest"),
    ],
)
def test_a_key_that_cannot_be_is_not_made(
    gateway: Served, fields: dict[str, Any], status: int, code: str, param: str
) -> None:
    with nothing_saved(gateway):
        refused(gateway.client.post(KEYS, json=fields), status, code, param)


@pytest.mark.parametrize("grace_s", [-1, 2_592_001, "1e999"])
def test_a_grace_that_cannot_be_is_refused(gateway: Served, grace_s: Any) -> None:
    old = made(gateway)
    with nothing_saved(gateway):
        answer = gateway.client.post(f"{KEYS}/{old['id']}/rotate", json={"grace_s": grace_s})
        refused(answer, 400, param="grace_s")


def test_a_tenant_is_made_once_and_tells_how_many_of_its_keys_work(gateway: Served) -> None:
    answer = gateway.client.post(TENANTS, json={"id": "acme", "name": "Acme & <b>sons</b>"})
    assert answer.status_code == 201
    made(gateway, tenant="acme")
    gateway.client.post(f"{KEYS}/{made(gateway, tenant='acme')['id']}/revoke").raise_for_status()
    found = gateway.client.get(f"{TENANTS}/acme").json()
    assert found == {**answer.json(), "working_keys": 1}
    assert found["name"] == "Acme & <b>sons</b>"
    assert found in gateway.client.get(TENANTS).json()["data"]
    with nothing_saved(gateway):
        refused(gateway.client.post(TENANTS, json={"id": "acme"}), 409, "tenant_exists", "id")
        refused(gateway.client.post(TENANTS, json={"id": "a b"}), 400, param="id")
        refused(gateway.client.get(f"{TENANTS}/nobody"), 404, "tenant_not_found")
    line = newest_line(gateway)
    assert (line["tenant"], line["action"], line["outcome"]) == ("acme", "tenant.create", "tenant_exists")


def test_the_audit_log_is_found_by_tenant_action_and_time_and_a_foreign_cursor_is_refused(gateway: Served) -> None:
    began = time.time()
    gateway.client.post(TENANTS, json={"id": "watched"}).raise_for_status()
    key = made(gateway, tenant="watched", name="hush")
    gateway.client.post(f"{KEYS}/{key['id']}/revoke").raise_for_status()

    def actions(**query: Any) -> list[str]:
        found = gateway.client.get(AUDIT, params={"limit": 100, **query})
        assert found.status_code == 200, found.text
        return [line["action"] for line in found.json()["data"]]

    assert actions(tenant="watched") == ["key.revoke", "key.create", "tenant.create"]
    assert actions(tenant="watched", action="key.create") == ["key.create"]
    assert actions(tenant="watched", until=began - 1) == []
    assert actions(tenant="watched", since=began - 1) == actions(tenant="watched")
    assert "hush" not in gateway.client.get(AUDIT, params={"limit": 100}).text
    for path in (AUDIT, KEYS, TENANTS):
        refused(gateway.client.get(path, params={"cursor": "x"}), 400, "invalid_cursor", "cursor")
        refused(gateway.client.get(path, params={"page": "x"}), 400, "unknown_parameter")
