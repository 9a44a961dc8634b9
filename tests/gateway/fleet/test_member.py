"""A replica on the terms that its entry names, and on those of the settings for the rest."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from engines.echo import EchoEngine
from engines.remote.http import Timeouts
from gateway.fleet.member import upstream_member
from gateway.fleet.roster import changed
from gateway.settings import Settings
from gateway.upstream import UpstreamAddress

WAITS = {"connect_timeout_s": 1.5, "first_delta_timeout_s": 20.0, "idle_timeout_s": 5.0, "total_timeout_s": 90.0}


def test_what_an_entry_leaves_open_is_as_the_settings_say() -> None:
    settings = Settings(**WAITS, max_in_flight=7, queue_max_waiting=9, queue_timeout_s=3.0)  # type: ignore[arg-type]
    member = upstream_member(settings, UpstreamAddress(url="http://a:1"))
    assert (member.timeouts.connect_s, member.timeouts.first_delta_s) == (1.5, 20.0)
    assert (member.timeouts.idle_s, member.timeouts.total_s) == (5.0, 90.0)
    assert (member.max_in_flight, member.max_waiting, member.max_wait_s) == (7, 9, 3.0)


def test_what_an_entry_names_holds_for_that_replica_alone() -> None:
    own = UpstreamAddress(
        url="http://a:1",
        **WAITS,
        max_in_flight=2,
        queue_max_waiting=0,
        queue_timeout_s=1.0,  # type: ignore[arg-type]
    )
    member = upstream_member(Settings(), own)
    assert member.timeouts == Timeouts(connect_s=1.5, first_delta_s=20.0, idle_s=5.0, total_s=90.0)
    replica = member.replica(EchoEngine(name="a:1"))
    assert (replica.max_in_flight, replica.queue.max_waiting, replica.queue.max_wait_s) == (2, 0, 1.0)
    assert upstream_member(Settings(), UpstreamAddress(url="http://b:1")).timeouts.idle_s == Settings().idle_timeout_s


def test_only_what_an_operator_wrote_into_the_settings_may_be_anywhere() -> None:
    address = UpstreamAddress(url="http://a:1")
    assert upstream_member(Settings(), address).anywhere
    assert not upstream_member(Settings(), address, source="api").anywhere
    assert upstream_member(Settings(link_local_replicas=True), address, source="api").anywhere


def test_a_replica_on_other_terms_or_wanted_no_more_leaves_and_the_others_stay() -> None:
    a, b = (upstream_member(Settings(), UpstreamAddress(url=f"http://{name}:1", name=name)) for name in "ab")
    other = upstream_member(Settings(), UpstreamAddress(url="http://b:1", name="b", max_in_flight=3))
    assert changed({"a": a, "b": b}, {"a": a, "b": b}) == []
    assert changed({"a": a, "b": b}, {"a": a, "b": other}) == ["b"]
    assert changed({"a": a, "b": b}, {"b": b}) == ["a"]


def test_a_key_is_not_shown_where_a_member_is() -> None:
    member = upstream_member(Settings(), UpstreamAddress(url="http://a:1", api_key="sk-secret"))  # type: ignore[arg-type]
    assert member.api_key == "sk-secret"
    assert "sk-secret" not in repr(member)


@pytest.mark.parametrize(
    "url",
    [
        "http://a:99999",
        "http://a:0",
        "http://a:b",
        "http://@a",
        "http://:@a",
        "http://a?",
        "http://a#",
        "http://a/?x",
        "http://a b",
        "http://a\tb",
        "http://a\n",
        " http://a",
        "http://a\\@b",
        "http://a\u200bb",
        "http://[::1",
        "http://",
        "//a",
        "http://a/" + "x" * 3000,
    ],
)
def test_what_is_no_plain_url_is_refused(url: str) -> None:
    with pytest.raises(ValidationError):
        UpstreamAddress(url=url, name="r")


def test_one_place_has_one_spelling() -> None:
    spelled = {UpstreamAddress(url=url).url for url in ("http://A.b:1", "HTTP://a.b:1/", "http://a.B:1/v1/")}
    assert spelled == {"http://a.b:1"}
    assert UpstreamAddress(url="http://a/Path").url == "http://a/Path"


def test_a_replica_is_named_after_its_host_where_that_makes_a_name() -> None:
    names = [UpstreamAddress(url=url).name for url in ("http://a.b-c:1/x/v1", "http://[::1]:8000", "https://h")]
    assert names == ["a.b-c:1", "[::1]:8000", "h"]
    for url in ("http://a%2Fb", "http://" + "a" * 80, "http://[fe80::1%25eth0]:1", "http://a;b", "http://.a"):
        with pytest.raises(ValidationError, match="give it a name"):
            UpstreamAddress(url=url)
        assert UpstreamAddress(url=url, name="r").name == "r"
    for name in (".", "..", ".x", "x/y", "x" * 65):
        with pytest.raises(ValidationError):
            UpstreamAddress(url="http://a", name=name)
