"""A request that breaks whoever takes it is no replica's failure."""

from __future__ import annotations

import pytest

from engines.contract import Capabilities, EngineBroken
from engines.echo import EchoEngine
from gateway.fleet.blame import Blame
from gateway.fleet.replica import FAILURES_TO_OPEN, Replica

BROKEN = EngineBroken("500")


def replicas(number: int) -> list[Replica]:
    return [Replica(EchoEngine(name=str(n)), "", Capabilities("vllm", ("m",)), healthy=True) for n in range(number)]


@pytest.mark.parametrize(
    ("broke", "answered", "failed"), [(1, True, 1), (1, False, 1), (2, True, 2), (2, False, 0), (3, False, 0)]
)
def test_who_broke_over_a_request_failed_unless_all_did(broke: int, answered: bool, failed: int) -> None:
    asked, blame = replicas(4), Blame()
    for replica in asked[:broke]:
        blame.broke(replica, BROKEN)
    assert not any(replica.failures for replica in asked), "not before it is known"
    blame.settle(0.0, answered=answered)
    assert [replica.failures for replica in asked] == [1] * failed + [0] * (4 - failed)
    blame.settle(0.0, answered=True)
    assert sum(replica.failures for replica in asked) == failed, "said once"


def test_one_that_breaks_over_every_request_rests_as_ever() -> None:
    (replica, _) = replicas(2)
    for _ in range(FAILURES_TO_OPEN):
        blame = Blame()
        blame.broke(replica, BROKEN)
        blame.settle(0.0, answered=True)
    assert replica.state == "resting"
