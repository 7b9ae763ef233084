"""Mosquitto as the oracle: the same packets to both, and the same answers.

Where the two differ on purpose the row is in DIFFERENT, with what we say and why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

import pytest

from gateway.protocols.mqtt.packets import (
    Ack,
    Connect,
    Disconnect,
    Publish,
    Subscribe,
    Subscription,
    Unsubscribe,
    Will,
)
from gateway.protocols.mqtt.spec import PacketType, Property, Version
from gateway.protocols.mqtt.writers import encode
from tests.interop.gateway_fixture import Running, running
from tests.interop.oracle.mqtt_client import CUT, Log, Script, by_client, run
from tests.interop.servers import Mosquitto

V5, V311, V31 = Version.V5, Version.V311, Version.V31
EXPIRY: Final = {Property.SESSION_EXPIRY_INTERVAL: 600}
PUBACK, PUBREC, PUBREL, PUBCOMP = PacketType.PUBACK, PacketType.PUBREC, PacketType.PUBREL, PacketType.PUBCOMP

# Scripts.

SCRIPTS: Final[dict[str, Callable[[Version, str], Script]]] = {}


def script(function: Callable[[Version, str], Script]) -> Callable[[Version, str], Script]:
    """Enter a script: of a version, and a word that no other script's topics and clients begin with."""
    SCRIPTS[function.__name__.replace("_", " ")] = function
    return function


def hello(v: Version, name: str, *, clean: bool = True, **more: Any) -> Connect:
    if v is V5 and not clean:
        more.setdefault("properties", EXPIRY)
    return Connect(name, v, clean, **more)


def sub(packet_id: int, *filters: Subscription | str) -> Subscribe:
    return Subscribe(
        packet_id, tuple(Subscription(one, 2) if isinstance(one, str) else one for one in filters)
    )


@script
def every_qos_in_both_directions(v: Version, t: str) -> Script:
    steps: Script = [("a", hello(v, f"{t}a")), ("b", hello(v, f"{t}b")), ("b", sub(1, f"{t}/#"))]
    return [
        *steps,
        ("a", Publish(f"{t}/0", b"0")),
        ("a", Publish(f"{t}/1", b"1", 1, packet_id=7)),
        ("b", Ack(PUBACK, 1)),
        ("a", Publish(f"{t}/2", b"2", 2, packet_id=8)),
        ("a", Ack(PUBREL, 8)),
        ("b", Ack(PUBREC, 2)),
        ("b", Ack(PUBCOMP, 2)),
    ]


@script
def qos_2_sent_twice_before_its_release(v: Version, t: str) -> Script:
    twice = Publish(t, b"x", 2, packet_id=3)
    steps: Script = [("a", hello(v, f"{t}a")), ("b", hello(v, f"{t}b"))]
    steps += [("b", sub(1, Subscription(t, 0))), ("a", twice)]
    return [
        *steps,
        ("a", Publish(t, b"x", 2, dup=True, packet_id=3)),
        ("a", Ack(PUBREL, 3)),
        ("a", twice),
        ("a", Ack(PUBREL, 3)),
    ]


@script
def a_session_that_goes_on(v: Version, t: str) -> Script:
    return [
        ("a", hello(v, f"{t}a", clean=False)),
        ("a", sub(1, f"{t}/+")),
        ("a", CUT),
        ("b", hello(v, f"{t}b")),
        ("b", Publish(f"{t}/1", b"1", 1, packet_id=1)),
        ("b", Publish(f"{t}/2", b"2", 2, packet_id=2)),
        ("b", Ack(PUBREL, 2)),
        ("b", Publish(f"{t}/0", b"0")),
        ("a", hello(v, f"{t}a", clean=False)),
        ("a", CUT),
        ("a", hello(v, f"{t}a", clean=False)),
        ("a", Ack(PUBACK, 1)),
        ("a", Ack(PUBREC, 2)),
        ("a", CUT),
        ("a", hello(v, f"{t}a", clean=False)),
        ("a", Ack(PUBCOMP, 2)),
        ("a", CUT),
        ("a", hello(v, f"{t}a", clean=True)),
        ("b", Publish(f"{t}/1", b"nobody", 0)),
    ]


@script
def another_takes_the_session_over(v: Version, t: str) -> Script:
    return [
        ("a", hello(v, f"{t}x", clean=False)),
        ("a", sub(1, t)),
        ("b", hello(v, f"{t}x", clean=False)),
        ("b", Publish(t, b"mine")),
    ]


@script
def a_will(v: Version, t: str) -> Script:
    will = Will(f"{t}/w", b"gone", 1, True)
    return [
        ("b", hello(v, f"{t}b")),
        ("b", sub(1, Subscription(f"{t}/#", 1))),
        ("a", hello(v, f"{t}a", will=will)),
        ("a", Disconnect()),
        ("a", hello(v, f"{t}a", will=will)),
        ("a", b"\x00\x00"),
        ("c", hello(v, f"{t}c")),
        ("c", sub(2, f"{t}/w")),
        ("c", Publish(f"{t}/w", b"", retain=True)),
    ]


@script
def retained_messages(v: Version, t: str) -> Script:
    return [
        ("a", hello(v, f"{t}a")),
        ("a", Publish(f"{t}/1", b"one", retain=True)),
        ("a", Publish(f"{t}/2/3", b"deep", 1, retain=True, packet_id=1)),
        ("b", hello(v, f"{t}b")),
        ("b", sub(1, f"{t}/1")),
        ("b", sub(2, f"{t}/+/3")),
        ("b", sub(3, f"{t}/1")),
        ("a", Publish(f"{t}/1", b"live", retain=True)),
        ("a", Publish(f"{t}/1", b"", retain=True)),
        ("a", Publish(f"{t}/2/3", b"", retain=True)),
        ("b", sub(4, f"{t}/#")),
    ]


@script
def several_filters_and_unsubscribing(v: Version, t: str) -> Script:
    return [
        ("a", hello(v, f"{t}a")),
        ("a", sub(9, Subscription(f"{t}/a", 0), Subscription(f"{t}/b", 1), Subscription(f"{t}/c", 2))),
        ("a", Unsubscribe(10, (f"{t}/a", f"{t}/b"))),
        ("a", Publish(f"{t}/a")),
        ("a", Publish(f"{t}/c", b"c")),
    ]


@script
def the_same_filter_again(v: Version, t: str) -> Script:
    return [
        ("a", hello(v, f"{t}a")),
        ("a", sub(1, Subscription(t, 1))),
        ("a", sub(2, Subscription(t, 0))),
        ("a", Publish(t, b"x", 1, packet_id=1)),
    ]


@script
def unknown_acknowledgements(v: Version, t: str) -> Script:
    return [("a", hello(v, f"{t}a")), ("a", Ack(PUBREL, 99))]


@script
def levels_and_wildcards(v: Version, t: str) -> Script:
    steps: Script = [("a", hello(v, f"{t}a")), ("a", sub(1, Subscription(f"{t}/+/b/#", 0)))]
    topics = ("x/b", "x/b/", "x/b/c/d", "/b", "x/y", "x//b", "b")
    return steps + [("a", Publish(f"{t}/{topic}", topic.encode())) for topic in topics]


@script
def shared_subscriptions(v: Version, t: str) -> Script:
    steps: Script = [("a", hello(v, f"{t}a")), ("a", Publish(f"{t}/1", b"kept", retain=True))]
    return [
        *steps,
        ("a", sub(1, Subscription(f"$share/{t}/{t}/#", 1))),
        ("a", Publish(f"{t}/1", b"live", 1, packet_id=1)),
        ("a", Unsubscribe(2, (f"$share/{t}/{t}/#",))),
        ("a", Publish(f"{t}/1", b"", retain=True)),
    ]


@script
def an_empty_client_identifier(v: Version, t: str) -> Script:
    return [("a", hello(v, "")), ("b", Connect("", v, False, properties={}))]


def _fault(name: str, data: bytes) -> None:
    def faulty(v: Version, t: str) -> Script:
        return [("a", hello(v, f"{t}a")), ("a", data)]

    SCRIPTS[name] = faulty


_fault("a second CONNECT", encode(Connect("x", V311), V311))
_fault("QoS 3", b"\x36\x06\x00\x01a\x00\x01x")
_fault("a wildcard in a topic", b"\x30\x05\x00\x02a#\x00")
_fault("SUBSCRIBE with wrong flags", b"\x80\x06\x00\x01\x00\x01a\x00")
_fault("UNSUBSCRIBE with wrong flags", b"\xa0\x05\x00\x01\x00\x01a")
_fault("PUBREL with wrong flags", b"\x60\x02\x00\x01")
_fault("SUBSCRIBE without filters", b"\x82\x02\x00\x01")
_fault("a remaining length of five bytes", b"\x30\xff\xff\xff\xff\x01")
_fault("packet type 0", b"\x00\x00")


BEFORE: Final[dict[str, Callable[[Version, str], Script]]] = {}


def before_connect(name: str, data: bytes) -> None:
    BEFORE[name] = lambda v, t: [("a", data)]


before_connect("PUBLISH before CONNECT", b"\x30\x04\x00\x01ax")
before_connect("PINGREQ before CONNECT", b"\xc0\x00")
before_connect("an unknown level", b"\x10\x0d\x00\x04MQTT\x09\x02\x00\x00\x00\x01c")
before_connect("an unknown name", b"\x10\x0d\x00\x04NOPE\x04\x02\x00\x00\x00\x01c")
before_connect("the reserved flag of CONNECT", b"\x10\x0d\x00\x04MQTT\x04\x03\x00\x00\x00\x01c")
before_connect("a will of QoS 3", b"\x10\x13\x00\x04MQTT\x04\x1e\x00\x00\x00\x01c\x00\x01w\x00\x01x")


# Scripts of MQTT 5 alone.

ONLY_5: Final[dict[str, Callable[[Version, str], Script]]] = {
    "properties are forwarded": lambda v, t: [
        ("a", hello(v, f"{t}a")),
        ("a", sub(1, Subscription(t, 0))),
        (
            "a",
            Publish(
                t,
                b"x",
                properties={
                    Property.PAYLOAD_FORMAT_INDICATOR: 1,
                    Property.CONTENT_TYPE: "t",
                    Property.RESPONSE_TOPIC: "r",
                    Property.CORRELATION_DATA: b"\xff\x00",
                    Property.USER_PROPERTY: (("b", "1"), ("a", "2"), ("b", "3")),
                },
            ),
        ),
    ],
    "no local and retain as published": lambda v, t: [
        ("a", hello(v, f"{t}a")),
        ("b", hello(v, f"{t}b")),
        ("a", sub(1, Subscription(t, 0, no_local=True))),
        ("b", sub(1, Subscription(t, 0, retain_as_published=True))),
        ("a", Publish(t, b"x", retain=True)),
        ("a", Publish(t, b"", retain=True)),
    ],
    "retain handling": lambda v, t: [
        ("a", hello(v, f"{t}a")),
        ("a", Publish(t, b"kept", retain=True)),
        ("a", sub(1, Subscription(t, 0, retain_handling=2))),
        ("a", sub(2, Subscription(t, 0, retain_handling=1))),
        ("a", sub(3, Subscription(t, 0, retain_handling=0))),
        ("a", Publish(t, b"", retain=True)),
    ],
    "a subscription identifier": lambda v, t: [
        ("a", hello(v, f"{t}a")),
        ("a", Subscribe(1, (Subscription(t),), {Property.SUBSCRIPTION_IDENTIFIER: (5,)})),
        ("a", Publish(t, b"x")),
    ],
    "unsubscribing from what is not there": lambda v, t: [
        ("a", hello(v, f"{t}a")),
        ("a", Unsubscribe(1, (f"{t}/none",))),
    ],
    "a client that leaves with its will": lambda v, t: [
        ("b", hello(v, f"{t}b")),
        ("b", sub(1, Subscription(t, 0))),
        ("a", hello(v, f"{t}a", will=Will(t, b"said"))),
        ("a", Disconnect(0x04)),
    ],
    "no local on a shared subscription": lambda v, t: [
        ("a", hello(v, f"{t}a")),
        ("a", sub(1, Subscription(f"$share/g/{t}", 0, no_local=True))),
    ],
    "an alias that stands for nothing": lambda v, t: [
        ("a", hello(v, f"{t}a")),
        ("a", Publish("", b"x", properties={Property.TOPIC_ALIAS: 1})),
    ],
    "an unknown authentication method": lambda v, t: [
        ("a", hello(v, f"{t}a", properties={Property.AUTHENTICATION_METHOD: "none"})),
    ],
}

ROWS: Final = [
    *[(name, version) for name in SCRIPTS for version in (V5, V311, V31)],
    *[(name, V311) for name in BEFORE],
    *[(name, V5) for name in ONLY_5],
]


class Difference(NamedTuple):
    """What only we say and what only Mosquitto says, and why."""

    ours: Log
    theirs: Log
    why: str


REASON: Final = "MQTT 5 has a reason for it, and Mosquitto just closes"
RETAINED: Final = "a shared subscription gets no retained messages (5: 4.8.2)"
DIFFERENT: Final[dict[tuple[str, Version], Difference]] = {
    ("another takes the session over", V5): Difference(
        [("a", "DISCONNECT", 0x8E)], [], "[MQTT-3.1.4-3]; Debian's Mosquitto just closes"
    ),
    ("unknown acknowledgements", V5): Difference(
        [("a", "PUBCOMP", 99, 0x92)], [("a", "PUBCOMP", 99, 0)], "the identifier is not known (5: 3.7.2.1)"
    ),
    **{
        ("shared subscriptions", version): Difference(
            [], [("a", "PUBLISH", f"t{at}/1", b"kept", 0, True, False, 0, ())], RETAINED
        )
        for at, (name, version) in enumerate(ROWS)
        if name == "shared subscriptions"
    },
    ("a second CONNECT", V5): Difference([("a", "DISCONNECT", 0x82)], [], REASON),
    ("PUBREL with wrong flags", V5): Difference([("a", "DISCONNECT", 0x81)], [], REASON),
    ("a remaining length of five bytes", V5): Difference([("a", "DISCONNECT", 0x81)], [], REASON),
    ("a wildcard in a topic", V5): Difference(
        [("a", "DISCONNECT", 0x90)], [("a", "DISCONNECT", 0x82)], "0x90 is the reason for it (5: 3.14.2.1)"
    ),
    ("SUBSCRIBE without filters", V31): Difference(
        [("a", "end")], [("a", "corrupt")], "Mosquitto answers with a SUBACK that answers nothing"
    ),
    ("an unknown name", V311): Difference(
        [("a", "CONNACK", False, 0x84, ())], [("a", "end")], "3.1.1 lets a server choose (3: 3.1.2.1)"
    ),
    ("no local on a shared subscription", V5): Difference(
        [("a", "DISCONNECT", 0x82), ("a", "end")], [("a", "SUBACK", 1, (0,))], "[MQTT-3.8.3-4]"
    ),
}


@pytest.fixture(scope="module")
def ours() -> Iterator[Running]:
    with running() as gateway:
        yield gateway


@pytest.mark.parametrize("name, version", ROWS, ids=[f"{name} in {version.name}" for name, version in ROWS])
def test_both_say_the_same(name: str, version: Version, ours: Running, mosquitto: Mosquitto) -> None:
    make = (SCRIPTS | BEFORE | ONLY_5)[name]
    word = f"t{ROWS.index((name, version))}"
    said = by_client(run(ours.mqtt, version, make(version, word)))
    theirs = by_client(run(mosquitto.port, version, make(version, word)))
    different = DIFFERENT.get((name, version))
    if different is None:
        assert said == theirs
    else:
        assert [heard for heard in said if heard not in theirs] == different.ours, different.why
        assert [heard for heard in theirs if heard not in said] == different.theirs, "no difference any more"
