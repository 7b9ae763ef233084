"""Everything that one row needs, built and taken down: gateway, remote brokers, proxies, sender and receiver.

Each leg goes through a proxy of its own: from the sender, to the receiver, and from the gateway to each
remote broker. Names carry a tag, so that rows share a RabbitMQ and find nothing of one another.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Final

import yaml

from gateway.protocols.mqtt.packets import Connack, Connect
from gateway.protocols.mqtt.spec import Property, Version
from tests.chaos.books import DAMAGED, close_books
from tests.chaos.checker import History, Id, Interval, is_short_lived
from tests.chaos.disk_errors import FailingDisk
from tests.chaos.faults import FAULTS, Disk
from tests.chaos.gateway_operator import LEFT, ROUTE, Operator
from tests.chaos.proxy import Proxy
from tests.chaos.scenarios import Place, Row
from tests.chaos.workers.amqp import AmqpReceiver, AmqpSender, queue_at
from tests.chaos.workers.amqpfast import FastReceiver, FastSender
from tests.chaos.workers.beside import Beside
from tests.chaos.workers.common import PROBE, Receiver, Sender, Worker
from tests.chaos.workers.group import Group, Member
from tests.chaos.workers.mqtt import EXPIRY_SECS, Device, MqttReceiver, MqttSender
from tests.files import replace_text
from tests.ingress.amqpfast.client import QUEUE, TOPIC
from tests.interop.gateway_fixture import LOOPBACK
from tests.interop.gateway_process import GatewayProcess
from tests.interop.servers import Mosquitto, RabbitMQ
from tests.interop.wrong_clock import Clock

ADDRESSES: Final = ("a0", "a1", "a2")
LISTENERS: Final = {"mqtt": "mqtt", "amqp": "amqp091", "fast": "amqpfast"}
PROBES_RATE: Final = 5.0
PROBES_MAX: Final = 10_000
MOSQUITTO_LINES: Final = (
    "persistence true",
    "autosave_interval 1",
    "max_queued_messages 0",
    "max_inflight_messages 100",
)
URLS: Final = {
    "rabbitmq": "amqp://guest:guest@{}/%2F",
    "mosquitto": "mqtt://{}",
    "other": "amqpfast://guest:guest@{}/",
}
# A link that lost a half-open connection is a second consumer as long as RabbitMQ believes in the first. So
# that no order is lost between the two the queue has one active consumer, which the link does not declare.
LINKS: Final[dict[Place, dict[str, Any]]] = {
    "rabbitmq": {"declare": "check"},
    "mosquitto": {"qos": 1},
    "other": {},
}
LINK: Final = {
    "heartbeat_secs": 2,
    "connect_timeout_secs": 2.0,
    "reconnect_min_secs": 0.1,
    "reconnect_max_secs": 0.5,
}
# An AMQP/Fast server decides itself how soon it misses a client.
LIMITS: Final = {"heartbeat_secs": 2}
MAPPING: Final = "mapping.yaml"
QUEUE_NAME: Final = "out"
FAILING: Final = frozenset({"slow-disk", "disk-error"})


@dataclass
class Rig:
    """What a row runs on, and what its faults break."""

    row: Row
    tag: str
    gateway: GatewayProcess
    history: History
    proxies: list[Proxy]
    sender: Sender
    prober: Sender
    receiver: Receiver
    beside: Beside
    operator: Operator
    mapping: Path
    store: Path  # folder
    rabbitmq: RabbitMQ | None = None
    mosquitto: Mosquitto | None = None
    other: GatewayProcess | None = None
    disk: Disk | None = None
    clock: Clock | None = None
    failing_disk: FailingDisk | None = None
    excused: list[Interval] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    discarded: int = 0  # at most so many messages were ended by operators or by damage
    unwritable: list[Interval] = field(default_factory=list)  # times when the disk took nothing
    clock_error_secs: float = 0.0
    accounted: set[Id] = field(default_factory=set)  # did not arrive, and are dead letters or counted
    account: str = ""
    is_changed: bool = False  # the mapping

    @property
    def workers(self) -> tuple[Worker, ...]:
        """Who is connected to something."""
        return (self.sender, self.prober, self.receiver, *self.beside.workers)

    @property
    def wills_excused(self) -> list[Interval]:
        """Times at which clients were let in whose wills a kill may lose: nothing could store them."""
        return self.unwritable if "kill-gateway" in self.row.faults else []

    @property
    def members(self) -> list[Member]:
        """Members of the shared subscription that receives."""
        assert isinstance(self.receiver, Group)
        return self.receiver.members

    def strike(self, fault: str, chance: Random) -> None:
        """Let something go wrong."""
        FAULTS[fault](self, chance)

    def mend(self) -> None:
        """Nothing is wrong any more; what is dead already stays dead."""
        for proxy in self.proxies:
            proxy.delay(0.0)
        if "pause-route" in self.row.faults:
            self.operator.post("routes/resume", name=ROUTE)

    def redriven(self) -> bool:
        """Redrive the dead letters of a row that makes some; return True if none is left."""
        return "redrive" not in self.row.faults or self.operator.redrive()

    def change_mapping(self) -> None:
        """Add a route to the mapping file that nothing uses, or remove it."""
        self.is_changed = not self.is_changed
        replace_text(self.mapping, mapping_of(self.row, self.tag, changed=self.is_changed))

    @property
    def queue(self) -> str:
        """Queue of a receiver of AMQP 0-9-1."""
        assert self.row.target == "amqp"
        return QUEUE_NAME

    def leave_session(self) -> None:
        """Leave a session that is owed what the receiver of MQTT gets."""
        way = "in" if self.row.direct else "out"
        with Device(self.gateway.port("mqtt")) as device:
            lasting = {Property.SESSION_EXPIRY_INTERVAL: EXPIRY_SECS}
            device.say(Connect(LEFT, Version.V5, False, 0, properties=lasting))
            device.next(Connack)
            device.subscribe(f"{way}/#", 1)
            device.machine.disconnect()
            device.flush()

    def may_expire(self, ids: set[Id]) -> set[Id]:
        """Return those that may expire before they arrive."""
        return {id for id in ids if is_short_lived(id)} if self.row.expiring else set()

    def close_books(self, wanted: set[Id], until: Callable[[Callable[[], bool]], bool]) -> None:
        """Compare what the gateway has counted with what arrived of what was accepted."""
        close_books(self, self.operator, wanted, until)

    def prepare(self, opened: Callable[[Callable[[], bool]], bool]) -> None:
        """What is declared and subscribed by now the brokers know after a kill, too. `opened` waits for a
        condition."""
        if self.rabbitmq is not None and "kill-rabbitmq" in self.row.faults:
            self.rabbitmq.save()
        if self.mosquitto is not None:
            opened(lambda: self.sender.connects > 0)
            self.mosquitto.save()

    def end(self) -> str:
        """The gateways are over: what they complained of is noted, and what the first one logged returned."""
        self.gateway.kill()
        expected = ["store not writable"] if self.row.full_or_failing else []
        expected += [DAMAGED] if "damage-row" in self.row.faults else []
        self.notes += complaints(self.gateway.log, expected)
        if self.other is not None:
            self.other.kill()
            self.notes += complaints(self.other.log)
        return self.gateway.log

    def idle_report(self) -> list[str]:
        """Return what still waits in the gateways, a line each."""
        others = [] if self.other is None else self.other.idle_report()
        return self.gateway.idle_report() + others

    @property
    def log(self) -> str:
        """What the gateway has said until now."""
        return self.gateway.log


def gateway_of(row: Row, folder: Path, tag: str, links: dict[Place, Proxy], store: Path) -> GatewayProcess:
    """The gateway of a row, not yet started."""
    mapping = folder / MAPPING
    mapping.write_text(mapping_of(row, tag))
    qos2: dict[str, Any] = {"qos": 2} if row.guarantee == "qos2" else {}
    return GatewayProcess(
        folder,
        mappings=[str(mapping)],
        links={
            name: {
                "url": URLS[name].format(f"{LOOPBACK}:{proxy.port}"),
                "client_id": f"gateway-{tag}",
                **LINKS[name],
                **(qos2 if name == "mosquitto" else {}),
                **LINK,
            }
            for name, proxy in links.items()
        },
        store={"path": str(store / "data"), "probe_secs": 0.1},
        drain_timeout_secs=2.0,
        limits=LIMITS,
        http={"host": LOOPBACK, "port": 0},
    )


def mapping_of(row: Row, tag: str, *, changed: bool = False) -> str:
    """Return the mapping file of a row; `changed`: with another route in front that nothing uses."""
    unused = {
        "name": "unused",
        "from": {"endpoint": "mqtt", "topic": "unused/{rest...}"},
        "to": {"endpoint": "amqp091", "exchange": "amq.topic", "routing_key": "unused.{rest...}"},
    }
    routes = [*([unused] if changed else []), _route(row, tag)]
    return yaml.safe_dump({"version": 1, "routes": routes})


def _route(row: Row, tag: str) -> dict[str, Any]:
    sources = {
        "mqtt": {"endpoint": "mqtt", "topic": "in/{rest...}"},
        "amqp": {"endpoint": "amqp091", "exchange": "amq.topic", "binding_key": "in.{rest...}"},
        "fast": {"endpoint": "amqpfast", "service": "topic", "destination": "in.{rest...}"},
        "rabbitmq": {"endpoint": "rabbitmq", "queue": f"{tag}.in"},
        "mosquitto": {"endpoint": "mosquitto", "topic": f"{tag}/in/{{rest...}}"},
        "other": {"endpoint": "other", "service": "topic", "destination": "in.{rest...}"},
    }
    rest = "{routing_key...}" if row.source == "rabbitmq" else "{rest...}"
    targets = {
        "mqtt": {"endpoint": "mqtt", "topic": f"out/{rest}"},
        "amqp": {"endpoint": "amqp091", "exchange": "amq.topic", "routing_key": f"out.{rest}"},
        "fast": {"endpoint": "amqpfast", "service": "queue", "destination": f"out.{rest}"},
        "rabbitmq": {"endpoint": "rabbitmq", "exchange": f"{tag}.out", "routing_key": rest},
        "mosquitto": {"endpoint": "mosquitto", "topic": f"{tag}/out/{rest}"},
        "other": {"endpoint": "other", "service": "queue", "destination": f"out.{rest}"},
    }
    if row.direct:  # it needs none, but a mapping file has at least one
        sources["mqtt"] = {"endpoint": "mqtt", "topic": "elsewhere/{rest...}"}
        sources["amqp"] = {**sources["amqp"], "binding_key": "elsewhere.{rest...}"}
        sources["fast"] = {**sources["fast"], "destination": "elsewhere.{rest...}"}
    more: dict[str, Any] = {"settle": row.settle}
    if row.deduplicate:
        more["deduplicate"] = {"by": "message_id", "window": "10m"}
    if "redrive" in row.faults:
        more["on_reject"] = "dead_letter"
    return {"name": ROUTE, "from": sources[row.source], "to": targets[row.target], **more}


def sender_of(row: Row, port: int, tag: str, history: History, *, probe: bool, version: Version) -> Sender:
    """The sender of a row, or who probes whether the way is open."""
    common: dict[str, Any] = {
        "addresses": ADDRESSES[:1] if probe else ADDRESSES,
        "count": PROBES_MAX if probe else row.messages,
        "rate": PROBES_RATE if probe else row.messages / row.seconds,
    }
    name = PROBE if probe else "sender"
    if row.source in ("mqtt", "mosquitto"):
        prefix = "in" if row.source == "mqtt" else f"{tag}/in"
        qos = 2 if row.guarantee == "qos2" else 1
        return MqttSender(name, port, history, prefix=prefix, qos=qos, version=version, **common)
    common["transacted"] = row.guarantee == "tx"
    if row.source in ("fast", "other"):
        service = QUEUE if row.direct else TOPIC
        return FastSender(name, port, history, service=service, prefix="in.", **common)
    if row.source == "amqp":
        return AmqpSender(name, port, history, exchange="amq.topic", prefix="in.", **common)
    queue = queue_at(f"{tag}.in", f"{tag}.in", "#", single=True)
    return AmqpSender(name, port, history, exchange=f"{tag}.in", prefix="", declarations=queue, **common)


def receiver_of(row: Row, port: int, tag: str, history: History, *, version: Version) -> Receiver:
    """The receiver of a row."""
    way = "in" if row.direct else "out"
    if row.target in ("mqtt", "mosquitto"):
        prefix = way if row.target == "mqtt" else f"{tag}/out"
        qos = 2 if row.guarantee == "qos2" else 1
        if row.members:
            return Group("receiver", port, history, row.members, prefix=prefix, qos=qos, version=version)
        return MqttReceiver("receiver", port, history, prefix=prefix, qos=qos, version=version)
    if row.target in ("fast", "other"):
        return FastReceiver("receiver", port, history, addresses=ADDRESSES, prefix=f"{way}.")
    if row.target == "amqp":
        queue = queue_at(QUEUE_NAME, "amq.topic", f"{way}.#", kind="")
        return AmqpReceiver("receiver", port, history, queue=QUEUE_NAME, prefix=f"{way}.", declarations=queue)
    queue = queue_at(f"{tag}.out", f"{tag}.out", "#")
    return AmqpReceiver("receiver", port, history, queue=f"{tag}.out", prefix="", declarations=queue)


@contextmanager
def rigged(row: Row, folder: Path, chance: Random, rabbitmq: RabbitMQ | None) -> Iterator[Rig]:
    """A rig whose gateway runs; its sender and receiver wait to be started.

    `rabbitmq` runs, and does so again afterwards; it may be None when the row needs none. Raises DiskError,
    CompilerError or PeerMissingError where the rig cannot be built.
    """
    tag = f"chaos-{chance.getrandbits(40):x}"
    versions = (Version.V5, Version.V311)
    with ExitStack() as stack:
        folder.mkdir(parents=True, exist_ok=True)
        mosquitto = None
        if "mosquitto" in row.remotes:
            place = folder / "mosquitto"
            lines = (*MOSQUITTO_LINES, f"persistence_location {place}/")
            mosquitto = stack.enter_context(Mosquitto(place, lines))
        other = None
        if "other" in row.remotes:
            place = folder / "other"
            other = stack.enter_context(GatewayProcess(place, limits=LIMITS, drain_timeout_secs=2.0))
        disk = stack.enter_context(Disk(folder / "disk")) if "full-disk" in row.faults else None
        clock = None
        if not {"clock", "clock-days"}.isdisjoint(row.faults):
            clock = Clock(folder / "clock")
        remote_ports = {
            "rabbitmq": rabbitmq.port if rabbitmq is not None else 0,
            "mosquitto": mosquitto.port if mosquitto is not None else 0,
            "other": other.port("amqpfast") if other is not None else 0,
        }
        links = {name: stack.enter_context(Proxy(remote_ports[name])) for name in sorted(row.remotes)}
        store = disk.folder if disk is not None else folder
        gateway = gateway_of(row, folder, tag, links, store)
        failing = None
        gateway.clock = clock
        if not FAILING.isdisjoint(row.faults):
            failing = FailingDisk(folder / "failing", store / "data")
            gateway.is_forked = False
            gateway.variables = failing.environment
        own = {name: gateway.configuration["listeners"][key]["port"] for name, key in LISTENERS.items()}
        ports = {**remote_ports, **own}
        near, far = (stack.enter_context(Proxy(ports[place])) for place in (row.source, row.target))
        history = History()
        version, receiving = chance.choice(versions), chance.choice(versions)
        if row.deduplicate or row.expiring:
            version = Version.V5  # before it a message has neither an id nor a time to live
        rig = Rig(
            row,
            tag,
            gateway,
            history,
            [near, far, *links.values()],
            sender_of(row, near.port, tag, history, probe=False, version=version),
            sender_of(row, near.port, tag, History(), probe=True, version=version),
            receiver_of(row, far.port, tag, history, version=receiving),
            Beside(own["mqtt"], chance),
            Operator(gateway),
            folder / MAPPING,
            store / "data",
            rabbitmq if "rabbitmq" in row.remotes else None,
            mosquitto,
            other,
            disk,
            clock,
            failing,
        )
        rig.sender.expiring = row.expiring
        stack.enter_context(gateway)
        yield rig


def complaints(log: str, expected: Sequence[str] = ()) -> list[str]:
    """Lines of a gateway's log that are errors, or no lines of a log at all."""
    found = []
    for line in log.splitlines():
        try:
            level, event = (said := json.loads(line)).get("level"), said.get("event", "")
        except ValueError:
            found.append(line)
            continue
        if level in ("error", "critical") and not any(word in event for word in expected):
            found.append(line)
    return found
