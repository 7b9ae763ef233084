"""What a client with every right receives while a test runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tests.access.test_doors import PASSWORD
from tests.ingress.clients import connect
from tests.interop.gateway_fixture import Running


@contextmanager
def received(gateway: Running, user: str, root: str) -> Iterator[list[bytes]]:
    """Yield the bodies that `user` has received below the topic `root` when the block has ended.

    A message of its own has come last by then.
    """
    found: list[bytes] = []
    client, _ = connect(gateway, "hears", user=(user, PASSWORD.encode()))
    with client:
        assert client.subscribe(f"{root}/#") == 0
        yield found
        client.publish(f"{root}/last", b"last", 0)
        while (body := client.body()) != b"last":
            found.append(body)
