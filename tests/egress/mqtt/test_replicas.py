"""Replicas of a gateway that share their link's subscriptions at a real Mosquitto."""

from __future__ import annotations

import subprocess
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import pytest

from tests.interop.gateway_fixture import LOOPBACK, Running
from tests.interop.servers import Mosquitto, program
from tests.interop.test_mqtt_link import WAIT_SECS, channel, conversation, fetch, linked, queue_of

COUNT: Final = 40


class Replicas:
    """Two gateways in one group, and a queue at each for what its link brings in."""

    def __init__(self, stack: ExitStack, mosquitto: Mosquitto, folder: Path, **link: Any) -> None:
        self._port = mosquitto.port
        self._stacks = [stack.enter_context(ExitStack()) for _ in range(2)]
        self.gateways: list[Running] = []
        self._queues: list[tuple[Any, str]] = []
        for name, own in zip("ab", self._stacks, strict=True):
            place = folder / f"{folder.name}-{name}"
            place.mkdir()
            gateway = own.enter_context(linked(self._port, place, share=folder.name, **link))
            opened = own.enter_context(channel(gateway))
            self.gateways.append(gateway)
            self._queues.append((opened, queue_of(opened, "up.#")))

    def publish(self, bodies: list[bytes]) -> None:
        command = [program("mosquitto_pub"), "-h", LOOPBACK, "-p", str(self._port), "-q", "1"]
        lines = b"".join(body + b"\n" for body in bodies)
        subprocess.run([*command, "-t", "up/x", "-l"], input=lines, check=True, timeout=30)

    def heard(self, count: int) -> list[list[bytes]]:
        """What each has heard, when it is `count` in all."""
        stats = [conversation(one).stats for one in self.gateways]
        self.gateways[0].until(lambda: sum(one.messages_in for one in stats) == count, WAIT_SECS)
        return [
            [body for _, _, body in fetch(opened, queue, one.messages_in)] if one.messages_in else []
            for (opened, queue), one in zip(self._queues, stats, strict=True)
        ]

    def lose_the_first(self) -> None:
        self._stacks[0].close()
        del self.gateways[0], self._queues[0]


@pytest.mark.parametrize("version", ["5.0", "3.1.1"])
def test_they_divide_what_the_broker_sends(mosquitto: Mosquitto, tmp_path: Path, version: str) -> None:
    bodies = [b"%d" % number for number in range(COUNT)]
    with ExitStack() as stack:
        replicas = Replicas(stack, mosquitto, tmp_path, version=version)
        replicas.publish(bodies)
        shares = replicas.heard(COUNT)
        assert all(shares)
        assert sorted(body for share in shares for body in share) == sorted(bodies)
        assert [conversation(one).stats.connects for one in replicas.gateways] == [1, 1]


@pytest.mark.parametrize("version", ["5.0", "3.1.1"])
def test_one_that_is_left_hears_everything(mosquitto: Mosquitto, tmp_path: Path, version: str) -> None:
    bodies = [b"%d" % number for number in range(COUNT)]
    with ExitStack() as stack:
        replicas = Replicas(stack, mosquitto, tmp_path, version=version, session_expiry_secs=0)
        replicas.lose_the_first()
        replicas.publish(bodies)
        assert replicas.heard(COUNT) == [bodies]
