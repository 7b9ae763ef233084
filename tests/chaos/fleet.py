"""`python -m tests.chaos.fleet`: a thousand devices at three replicas that are replaced one after the other.

Every device has a session that outlives its connections, publishes to another one at its own pace, and is
published to. Half of them do both with QoS 2, half with QoS 1; half speak MQTT 5. A device that is sent away,
or finds nobody, goes to the next replica. In the end everything that was acknowledged has to have come, and
nothing twice at QoS 2.
"""

from __future__ import annotations

import argparse
import heapq
import select
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final, NamedTuple

from gateway.errors import RemoteProtocolError
from gateway.protocols.mqtt.client import ClientConnection
from gateway.protocols.mqtt.connection import State
from gateway.protocols.mqtt.packets import Ack, Connack, Connect, Disconnect, Event, Suback, Subscription
from gateway.protocols.mqtt.runs import Acks, Publishes
from gateway.protocols.mqtt.spec import DUP, FAILURE, QOS, PacketType, Property, Version
from tests.chaos.checker import History, Id, Verdict, body_of, id_of, judge, stranger
from tests.chaos.replicas.rig import replica_of
from tests.chaos.replicas.rows import ReplicaRow
from tests.chaos.rig import complaints
from tests.interop.cluster import RabbitCluster
from tests.interop.gateway_fixture import LOOPBACK
from tests.interop.gateway_process import GatewayProcess
from tests.interop.servers import RabbitMQ

EXPIRY_SECS: Final = 3_600
KEEP_ALIVE_SECS: Final = 10
OPEN_SECS_MAX: Final = 20.0  # from connecting to the last SUBACK
AGAIN_SECS: Final = 0.2
WINDOW: Final = 4
TURN_SECS: Final = 0.02
PATIENCE_SECS: Final = 120.0
CONNECTING_MAX: Final = 200  # devices that may be between SYN and SUBACK at a time
IDS: Final = 65_535
VERSIONS: Final = (Version.V5, Version.V311)


class Device:
    """One device, whichever connection it has."""

    def __init__(self, fleet: Fleet, number: int, mate: str) -> None:
        self.name = f"{fleet.tag}-{number}"
        self.mate = mate
        self.sent = 0
        self.connects = 0
        self.open = False
        self.why = ""
        self.away_secs = 0.0  # at the longest, once it had been there
        self._fleet = fleet
        self._qos = 1 + number % 2
        self._version = VERSIONS[number // 2 % 2]
        self._turn = number  # of the replicas
        self._sock: socket.socket | None = None
        self._machine = ClientConnection(packet_bytes_max=1_048_576)
        self._unsent = b""
        self._left_at = 0.0
        self._began_at = 0.0
        self._last_id = 0
        self._publishing: dict[int, Id] = {}  # by packet identifier: PUBACK or PUBREC is missing
        self._releasing: dict[int, None] = {}  # PUBCOMP is missing
        self._known: set[int] = set()  # of QoS 2 that has come, and waits for its PUBREL

    @property
    def owes(self) -> int:
        """What it has begun to publish and does not know to be over."""
        return len(self._publishing) + len(self._releasing)

    @property
    def opening(self) -> bool:
        """It has a connection and cannot use it yet."""
        return self._sock is not None and not self.open

    @property
    def overdue(self) -> bool:
        """Its connection leads nowhere."""
        return self.opening and time.monotonic() - self._began_at > OPEN_SECS_MAX

    def connect(self) -> None:
        """Go to the next replica."""
        ports = self._fleet.ports
        self._turn += 1
        self._began_at = time.monotonic()
        sock = socket.socket()
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            sock.connect((LOOPBACK, ports[self._turn % len(ports)]))
        except OSError as error:
            sock.close()
            self._again(str(error))
            return
        sock.setblocking(False)
        self._sock = sock
        self._machine = ClientConnection(packet_bytes_max=1_048_576)
        self._unsent = b""
        expiry = {Property.SESSION_EXPIRY_INTERVAL: EXPIRY_SECS} if self._version is Version.V5 else {}
        packet = Connect(self.name, self._version, False, KEEP_ALIVE_SECS, properties=expiry)
        self._machine.connect(packet, self._began_at)
        self._fleet.watch(sock, self)
        self.flush()

    def publish(self) -> None:
        """The next one for its mate, if there is room for it."""
        if not self.open or self.owes >= WINDOW:
            return
        self.sent += 1
        id = Id(self.name, self.mate, self.sent)
        self._publish(self._free(), id)
        self.flush()

    def tick(self, now: float) -> None:
        """Keep-alive."""
        if self.open and self._machine.timed_out(now):
            self.leave("the replica is silent")
        elif self.open and now >= self._machine.ping_at():
            self._machine.send_pingreq(now)
            self.flush()

    def flush(self) -> None:
        """Write what the socket takes."""
        sock = self._sock
        self._unsent += self._machine.data_to_send()
        if sock is None or not self._unsent:
            return
        try:
            count = sock.send(self._unsent)
        except BlockingIOError:
            return
        except OSError as error:
            self.leave(str(error))
            return
        self._unsent = self._unsent[count:]

    def read(self) -> None:
        """Something has come, or the end."""
        assert self._sock is not None
        try:
            data = self._sock.recv(65_536)
        except BlockingIOError:
            return
        except OSError as error:
            self.leave(str(error))
            return
        if not data:
            self.leave("closed")
            return
        try:
            for event in self._machine.receive_data(data, time.monotonic()):
                self._take(event)
        except RemoteProtocolError as error:
            self._fleet.notes.append(f"{self.name}: {error}")
            self.leave(str(error))
        self.flush()

    def leave(self, why: str) -> None:
        """The connection is over; another one is tried in a moment."""
        if self._sock is not None:
            self._fleet.forget(self._sock)
            self._sock.close()
            self._sock = None
        if self.open:
            self._left_at = time.monotonic()
        self.open = False
        self._again(why)

    def close(self) -> None:
        """For good, and its session with it."""
        if self._sock is not None:
            self._fleet.forget(self._sock)
            self._sock.close()
            self._sock = None
        self.open = False

    def _again(self, why: str) -> None:
        self.why = why
        self._fleet.later(AGAIN_SECS, self)

    def _take(self, event: Event) -> None:
        if isinstance(event, Connack):
            self._answered(event)
        elif isinstance(event, Suback):
            if event.reasons[0] >= FAILURE:
                self.leave(f"the subscription was refused: {event.reasons[0]:#04x}")
                return
            if self._left_at:
                self.away_secs = max(self.away_secs, time.monotonic() - self._left_at)
            self.open = True
        elif isinstance(event, Disconnect):
            self.leave(f"sent away: {event.reason:#04x}")
        elif isinstance(event, Publishes):
            self._received(event)
        elif isinstance(event, Acks):
            self._acknowledged(event)

    def _answered(self, connack: Connack) -> None:
        if connack.reason >= FAILURE or self._machine.state is not State.OPEN:
            self.leave(f"refused: {connack.reason:#04x}")
            return
        if self.connects and not connack.session_present:
            self._fleet.notes.append(f"the session of {self.name} was forgotten")
            self._known.clear()
        self.connects += 1
        self._machine.subscribe(1, [Subscription(self.name, self._qos)], {})
        for packet_id, id in sorted(self._publishing.items(), key=lambda one: one[1].number):
            self._publish(packet_id, id, dup=True)
        for packet_id in self._releasing:
            self._machine.send(Ack(PacketType.PUBREL, packet_id))

    def _publish(self, packet_id: int, id: Id, *, dup: bool = False) -> None:
        self._publishing[packet_id] = id
        self._fleet.history.sent(id)
        self._machine.publish(self.mate.encode(), body_of(id), self._qos, packet_id=packet_id, dup=dup)

    def _free(self) -> int:
        while True:
            self._last_id = self._last_id % IDS + 1
            if self._last_id not in self._publishing and self._last_id not in self._releasing:
                return self._last_id

    def _received(self, event: Publishes) -> None:
        for flags, topic, packet_id, _, body in event.rows:
            twice = flags & QOS == 4
            if not twice or packet_id not in self._known:
                id = id_of(body) or stranger(body)
                self._fleet.history.received(id, topic.decode(), bool(flags & DUP))
            if twice:
                self._known.add(packet_id)
            self._machine.send(Ack(PacketType.PUBREC if twice else PacketType.PUBACK, packet_id))

    def _acknowledged(self, acks: Acks) -> None:
        for packet_id, reason in acks.rows:
            if acks.kind is PacketType.PUBREL:
                self._known.discard(packet_id)
                self._machine.send(Ack(PacketType.PUBCOMP, packet_id))
            elif acks.kind is PacketType.PUBCOMP:
                self._releasing.pop(packet_id, None)
            elif (id := self._publishing.pop(packet_id, None)) is not None:
                if reason >= FAILURE:
                    self._fleet.history.refused(id)
                    self._fleet.refused[reason] += 1
                    self._publish(self._free(), id)
                    continue
                self._fleet.history.acked(id)
                if acks.kind is PacketType.PUBREC:
                    self._releasing[packet_id] = None
                    self._machine.send(Ack(PacketType.PUBREL, packet_id))


class Fleet(threading.Thread):
    """All devices, in one thread. Each publishes `rate` messages a second to the one two places further, so
    that both have the same QoS; `clients` is a multiple of two."""

    def __init__(self, ports: Sequence[int], tag: str, clients: int, rate: float) -> None:
        super().__init__(name="fleet", daemon=True)
        self.ports = tuple(ports)
        self.tag = tag
        self.history = History()
        self.notes: list[str] = []  # what must not have happened
        self.refused: Counter[int] = Counter()  # by reason code
        self.error: BaseException | None = None
        self._pause = 1 / rate
        self._poll = select.epoll()
        self._by_number: dict[int, Device] = {}
        self._later: list[tuple[float, int, Device]] = []
        self._count = 0
        self._publishing = False
        self._going = True
        names = [f"{tag}-{number}" for number in range(clients)]
        self.devices = [Device(self, number, names[(number + 2) % clients]) for number in range(clients)]

    # What devices ask.

    def watch(self, sock: socket.socket, device: Device) -> None:
        """Read it when there is something to read."""
        self._by_number[sock.fileno()] = device
        self._poll.register(sock, select.EPOLLIN)

    def forget(self, sock: socket.socket) -> None:
        """Its connection is over."""
        self._poll.unregister(sock)
        del self._by_number[sock.fileno()]

    def later(self, secs: float, device: Device) -> None:
        """It wants to connect then."""
        self._count += 1
        heapq.heappush(self._later, (time.monotonic() + secs, self._count, device))

    # What the test asks, from its own thread.

    def begin(self) -> None:
        """Everybody publishes, from now on."""
        self._publishing = True

    def cease(self) -> None:
        """Nobody publishes anything new."""
        self._publishing = False

    def until(self, condition: str, count: int | None = None, patience: float = PATIENCE_SECS) -> None:
        """Return when all devices, or as many, are `open`, or `even`: with nothing that is not acknowledged.
        AssertionError when that takes too long."""
        end = time.monotonic() + patience
        while True:
            if self.error is not None:
                raise self.error
            found = [one for one in self.devices if (one.open if condition == "open" else not one.owes)]
            if len(found) >= (len(self.devices) if count is None else count):
                return
            if time.monotonic() > end:
                lacking = Counter(one.why for one in self.devices if one not in found)
                raise AssertionError(f"{len(found)} of {len(self.devices)} are {condition}: {lacking}")
            time.sleep(TURN_SECS)

    def stop(self) -> None:
        """Leave, and wait until all have."""
        self._going = False
        self.join()

    # Its own thread.

    def run(self) -> None:
        """Until told to stop."""
        try:
            self._run()
        except BaseException as error:
            self.error = error
        finally:
            for device in self.devices:
                device.close()
            self._poll.close()

    def _run(self) -> None:
        began = time.monotonic()
        for at, device in enumerate(self.devices):
            self.later(at / 1_000, device)
        due = [began + self._pause * at / len(self.devices) for at in range(len(self.devices))]
        turn, tick_at = 0, began
        while self._going:
            for number, _ in self._poll.poll(TURN_SECS):
                ready = self._by_number.get(number)
                if ready is not None:
                    ready.read()
            now = time.monotonic()
            self._connect(now)
            while due[turn] <= now:
                due[turn] = max(due[turn] + self._pause, now - self._pause)
                if self._publishing:
                    self.devices[turn].publish()
                turn = (turn + 1) % len(due)
            if now - tick_at > 1.0:
                tick_at = now
                for device in self.devices:
                    device.tick(now)
                    if device.overdue:
                        device.leave("never let in")

    def _connect(self, now: float) -> None:
        opening = sum(device.opening for device in self.devices) if self._later else 0
        while self._later and self._later[0][0] <= now and opening < CONNECTING_MAX:
            heapq.heappop(self._later)[2].connect()
            opening += 1


class Rolled(NamedTuple):
    """What came of it. `away_secs` is how long each device was without a connection, at the longest."""

    verdict: Verdict
    notes: list[str]
    refused: Counter[int]
    connects: int
    away_secs: list[float]
    roll_secs: list[float]

    @property
    def sound(self) -> bool:
        """Nothing is wrong with the gateway."""
        return not self.verdict.faults and not self.notes

    def __str__(self) -> str:
        away = sorted(self.away_secs)
        middle, most = away[len(away) // 2], away[-1]
        told = ", ".join(f"{secs:.1f}" for secs in self.roll_secs)
        return "\n".join(
            (
                str(self.verdict),
                f"{self.connects} connections; away for {middle:.2f} s in the middle, {most:.2f} at most; "
                f"replicas were replaced in {told} s; refused: {dict(self.refused) or 'nothing'}",
                *self.notes,
            )
        )


def judged(history: History) -> Verdict:
    """What was published at QoS 1 may come again, and there marked; the others must not."""
    verdict = judge(history.records)
    twice = judge([one for one in history.records if _number(one.id) % 2], once=True)
    return verdict._replace(duplicated=twice.duplicated)


def _number(id: Id) -> int:
    return int(id.source.rpartition("-")[2]) if "-" in id.source else 0


def roll(
    folder: Path, brokers: RabbitMQ | RabbitCluster, *, clients: int, replicas: int, rate: float, secs: float
) -> Rolled:
    """Replace one replica after the other while the devices publish, with `secs` between them."""
    tag = f"fleet{time.time_ns() % 1_000_000:x}"
    nodes = [brokers] if isinstance(brokers, RabbitMQ) else brokers.nodes
    row = ReplicaRow("mqtt", "mqtt", "qos2", "classic" if len(nodes) == 1 else "quorum", ("roll",))
    with ExitStack() as stack:
        made: list[GatewayProcess] = []
        for at in range(replicas):
            turned = [*nodes[at % len(nodes) :], *nodes[: at % len(nodes)]]
            one = replica_of(folder, f"replica-{at}", [node.port for node in turned], tag, row, None)
            one.configuration["drain_timeout_secs"] = 20.0
            one.configuration["broker"]["engine_timeout_secs"] = 10.0
            one.configuration["broker"]["heartbeat_secs"] = 10
            made.append(stack.enter_context(one))
        fleet = Fleet([one.port("mqtt") for one in made], tag, clients, rate)
        fleet.start()
        took = []
        try:
            fleet.until("open", patience=max(PATIENCE_SECS, clients / 5))
            fleet.begin()
            time.sleep(secs)
            for one in made:
                began = time.monotonic()
                if code := one.terminate():
                    fleet.notes.append(f"a replica ended with {code} after SIGTERM")
                one.start()
                took.append(time.monotonic() - began)
                fleet.until("open")
                time.sleep(secs)
            fleet.cease()
            fleet.until("even")
            _settle(fleet)
        finally:
            fleet.stop()
        for one in made:
            one.kill()
            fleet.notes += complaints(one.log)
    return Rolled(
        judged(fleet.history),
        fleet.notes,
        fleet.refused,
        sum(device.connects for device in fleet.devices),
        [device.away_secs for device in fleet.devices],
        took,
    )


def _settle(fleet: Fleet) -> None:
    """Wait until what was acknowledged has come, and nothing comes any more."""
    end = time.monotonic() + PATIENCE_SECS
    before, missing = -1, True
    while time.monotonic() < end and (missing or len(fleet.history.records) != before):
        before = len(fleet.history.records)
        missing = bool(judge(list(fleet.history.records)).lost)
        time.sleep(1.0)


def main(given: list[str]) -> int:
    """0: nothing was lost, and nothing came twice that must not."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.fleet", description=__doc__)
    parser.add_argument("--clients", type=int, default=1_000, help="(default: %(default)s)")
    parser.add_argument("--replicas", type=int, default=3, help="(default: %(default)s)")
    parser.add_argument("--nodes", type=int, default=1, help="of RabbitMQ (default: %(default)s)")
    parser.add_argument("--rate", type=float, default=1.0, help="messages a second of each device")
    parser.add_argument("--secs", type=float, default=5.0, help="between two replicas (default: %(default)s)")
    words = parser.parse_args(given)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gateway-fleet-")))
        brokers: RabbitMQ | RabbitCluster
        if words.nodes == 1:
            brokers = stack.enter_context(RabbitMQ(folder / "rabbitmq"))
        else:
            brokers = stack.enter_context(RabbitCluster(folder / "cluster", words.nodes))
        result = roll(
            folder / "run",
            brokers,
            clients=words.clients,
            replicas=words.replicas,
            rate=words.rate,
            secs=words.secs,
        )
    print(f"{'sound' if result.sound else 'FAILED'} {words.clients} devices at {words.replicas} replicas")
    print(result)
    return not result.sound


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
