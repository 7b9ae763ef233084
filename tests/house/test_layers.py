"""What puts everything together has no case per protocol: what is of one it takes from the dialect."""

from __future__ import annotations

from gateway.protocols import OWN
from tests.house.sources import OURS, ROOT
from tests.house.test_cycles import imported

FOLDERS = tuple(f"gateway.{room}.{one.name}" for room in ("ingress", "egress", "clients") for one in OWN)


def test_the_application_knows_no_protocols_connections() -> None:
    found = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in OURS
        if path.parent == ROOT / "gateway" / "app"
        for name in imported(path)
        if name.startswith(FOLDERS)
    }
    assert found == set()
