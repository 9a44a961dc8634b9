"""Secret and API keys: what derives from what, and who is let in."""

import hashlib
import hmac
import re
import stat
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from gateway.errors import Forbidden, Unauthorized
from gateway.secrets import SecretUnusable, derive, load_secret
from gateway.settings import Settings
from gateway.tenancy import (
    LOCAL,
    SCOPES,
    Identity,
    affinity,
    cache_salt,
    identify,
    key_digest,
    key_of,
    new_key,
    successor,
)

SECRET = b"s" * 32
NOW = 1_800_000_000.0


def test_derive_is_hkdf_of_rfc_5869() -> None:
    pseudorandom_key = hmac.new(b"turnkeep/1", SECRET, hashlib.sha256).digest()
    first = hmac.new(pseudorandom_key, b"label\x01", hashlib.sha256).digest()
    second = hmac.new(pseudorandom_key, first + b"label\x02", hashlib.sha256).digest()
    assert derive(SECRET, "label") == first
    assert derive(SECRET, "label", 40) == (first + second)[:40]


def test_each_purpose_has_a_key_of_its_own() -> None:
    labels = ["api key", "cache salt", "affinity", "cursor"]
    assert len({derive(SECRET, label) for label in labels}) == len(labels)
    assert derive(b"t" * 32, "api key") != derive(SECRET, "api key")


def test_the_secret_is_made_once_for_its_owner_only(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path / "new")
    made = load_secret(settings)
    assert load_secret(settings) == made
    assert len(made) == 64
    assert stat.S_IMODE((tmp_path / "new" / "secret").stat().st_mode) == 0o600
    assert [file.name for file in (tmp_path / "new").iterdir()] == ["secret"]


def test_gateways_that_start_at_once_agree_on_the_secret(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path)
    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(lambda _: load_secret(settings), range(32)))) == 1


def test_a_secret_that_others_can_read_is_refused(tmp_path: Path) -> None:
    load_secret(Settings(data_dir=tmp_path))
    (tmp_path / "secret").chmod(0o644)
    with pytest.raises(SecretUnusable, match="chmod 600"):
        load_secret(Settings(data_dir=tmp_path))


def test_a_damaged_secret_is_refused(tmp_path: Path) -> None:
    (tmp_path / "secret").touch(mode=0o600)
    with pytest.raises(SecretUnusable, match="damaged"):
        load_secret(Settings(data_dir=tmp_path))


def test_the_setting_goes_before_the_file(tmp_path: Path) -> None:
    assert load_secret(Settings(data_dir=tmp_path / "none", secret="x" * 40)) == b"x" * 40
    assert not (tmp_path / "none").exists()


def test_a_key_is_shown_once_and_stored_as_a_digest() -> None:
    key, record = new_key(SECRET, name="laptop", now=NOW)
    assert re.fullmatch(r"tk-[A-Za-z0-9_-]{43}", key)
    assert record.id == key[:11]
    assert key[11:].encode() not in record.digest
    assert record.digest == key_digest(SECRET, key) != key_digest(b"t" * 32, key)
    assert key != new_key(SECRET, name="laptop", now=NOW)[0]


def test_a_key_s_successor_is_another_key_for_the_same() -> None:
    _, old = new_key(SECRET, tenant_id="acme", name="laptop", scopes=frozenset({"read"}), now=NOW, expires_at=NOW + 9)
    key, new = successor(SECRET, old, now=NOW + 1)
    same = replace(old, id=key[:11], digest=key_digest(SECRET, key), created_at=NOW + 1, replaces=old.id)
    assert new == same
    assert new.digest != old.digest


def test_a_key_that_is_replaced_works_until_its_end() -> None:
    key, record = new_key(SECRET, name="laptop", now=NOW)
    ending = replace(record, replaced_by="tk-other", expires_at=NOW + 5)
    assert [ending.state(NOW), ending.state(NOW + 5), replace(ending, revoked_at=NOW).state(NOW)] == [
        "ending",
        "expired",
        "revoked",
    ]
    assert identify(key_digest(SECRET, key), ending, NOW)


def test_a_known_key_says_whose_it_is() -> None:
    key, record = new_key(SECRET, tenant_id="acme", name="laptop", scopes=frozenset({"chat"}), now=NOW)
    who = identify(key_digest(SECRET, key_of(f"Bearer {key}")), record, NOW)
    assert who == Identity("acme", key[:11], frozenset({"chat"}))


@pytest.mark.parametrize("field", ["revoked_at", "expires_at", "digest", None])
def test_a_key_that_is_unknown_revoked_or_past_its_time_is_refused_in_the_same_words(field: str | None) -> None:
    key, record = new_key(SECRET, name="laptop", now=NOW)
    spoilt = replace(record, **{field: bytes(32) if field == "digest" else NOW}) if field else None
    with pytest.raises(Unauthorized, match="unknown, revoked or past its time"):
        identify(key_digest(SECRET, key), spoilt, NOW)


def test_a_key_works_up_to_its_last_second() -> None:
    key, record = new_key(SECRET, name="laptop", now=NOW, expires_at=NOW + 1)
    assert identify(key_digest(SECRET, key), record, NOW + 0.9)


@pytest.mark.parametrize(
    "header", [None, "", "Bearer", "Bearer ", "Bearer sk-1234", "Basic tk-" + "a" * 43, "Bearer tk-" + "a" * 1_000_000]
)
def test_what_cannot_be_a_key_is_refused_before_any_look_up(header: str | None) -> None:
    with pytest.raises(Unauthorized):
        key_of(header)


def test_a_scope_that_is_missing_is_forbidden_and_admin_has_all() -> None:
    with pytest.raises(Forbidden, match="sessions"):
        Identity("a", "k", frozenset({"chat"})).need("sessions")
    for scope in SCOPES:
        LOCAL.need(scope)
        Identity("a", "k", frozenset({"admin"})).need(scope)


@pytest.mark.parametrize("bad", [{"tenant_id": "a/b"}, {"tenant_id": ""}, {"scopes": frozenset({"root"})}])
def test_a_key_for_a_tenant_or_scope_that_cannot_be_is_refused(bad: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"tenant's name|no scope"):
        new_key(SECRET, name="x", now=NOW, **bad)  # type: ignore[arg-type]


def test_salts_and_affinities_differ_between_tenants_and_fit_an_engine() -> None:
    salts = {cache_salt(SECRET, tenant) for tenant in ("a", "b", "a.b")}
    assert len(salts) == 3
    assert all(re.fullmatch(r"[A-Za-z0-9_-]{1,64}", salt) for salt in salts)
    assert affinity(SECRET, "a", "bc") != affinity(SECRET, "ab", "c")
    assert affinity(SECRET, "a", "s") == affinity(SECRET, "a", "s") != cache_salt(SECRET, "a")
