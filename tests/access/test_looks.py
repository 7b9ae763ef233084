"""When rules change, everybody is looked at; a fault at one of them is told, and costs nobody else."""

from __future__ import annotations

import pytest

from gateway.access.http_authorization import AuthorizerRequest, AuthorizerResponse
from gateway.app.rules import _run_check
from gateway.containment import counted
from gateway.model.pending import Pending


class Broken:
    """An authorizer that cannot even be asked."""

    mqtt_host = "/"

    def cached_decision(self, request: AuthorizerRequest) -> bool | None:
        return None

    async def query(self, request: AuthorizerRequest) -> None:
        raise UnicodeError("not a name")


def _fails() -> None:
    raise KeyError("a session that is odd")


def _asks() -> None:
    raise Pending(AuthorizerResponse(AuthorizerRequest("vhost", ()), Broken()))


@pytest.mark.parametrize("look", [_fails, _asks])
async def test_a_fault_at_one_client_ends_with_it(look: object) -> None:
    before = counted["reload"]
    await _run_check(look)  # type: ignore[arg-type]
    assert counted["reload"] == before + 1
