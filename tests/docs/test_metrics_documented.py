"""docs/admin.md lists every metric of the gateway, and no other."""

import re
from pathlib import Path

from gateway.metrics import Metrics

PAGE = (Path(__file__).parents[2] / "docs" / "admin.md").read_text()


def test_every_metric_stands_in_the_docs_and_no_other() -> None:
    families = list(Metrics().registry.collect())
    names = {family.name + ("_total" if family.type == "counter" else "") for family in families}
    assert set(re.findall(r"`(turnkeep_[a-z_]+)", PAGE)) == names
    assert all(family.documentation for family in families)
