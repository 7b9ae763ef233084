"""The negotiation, and every line of the flow summaries (3.2.10, 3.3.9, 3.5.17) as a row."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest

from gateway.errors import LocalProtocolError
from gateway.model.properties import string
from gateway.protocols.amqpfast import commands as m
from gateway.protocols.amqpfast import events as e
from gateway.protocols.amqpfast.codec import END, encode_command
from gateway.protocols.amqpfast.connection import Connection
from gateway.protocols.amqpfast.server import ServerConnection
from gateway.protocols.amqpfast.spec import INITIATION, PAUSED_BYTES_MAX, ReplyCode, Scope
from gateway.protocols.amqpfast.states import (
    CHANNEL_COMMANDS,
    HANDLE_COMMANDS,
    RULES,
    Answer,
    ChannelState,
    HandleState,
    State,
)
from tests.protocols.amqpfast.wires import GUEST, NAMED, Wire, bytes_apart, new_client, open_wire, queue_wire

# --- the negotiation


def test_the_negotiation() -> None:
    server = ServerConnection(heartbeat=30, frame_max=50_000, channel_max=0, handle_max=7)
    wire = Wire(server, new_client(virtual_path="v", client_name="c", heartbeat=10, channel_max=5))
    wire.move()
    at_server, at_client = wire.take()
    assert at_server == [e.Authenticate("PLAIN", GUEST, True), e.Open("v", "c", ())]
    assert at_client == [e.Opened()]
    for side in (wire.server, wire.client):
        assert (side.frame_max, side.channel_max, side.handle_max) == (50_000, 5, 7)
        assert side.state is State.ACTIVE
    assert (server.heartbeat, server.peer_heartbeat) == (30, 10)
    assert (wire.client.heartbeat, wire.client.peer_heartbeat) == (10, 30)
    named = {m.FRAME_NAMES[kind]: count for kind, count in enumerate(server.received) if count}
    assert named == {"connection.response": 1, "connection.tune": 1, "connection.open": 1}
    named = {m.FRAME_NAMES[kind]: count for kind, count in enumerate(server.sent) if count}
    assert named == {"connection.challenge": 1, "connection.tune": 1, "connection.reply": 1}


def test_the_negotiation_byte_by_byte() -> None:
    wire = Wire()
    wire.move(bytes_apart)
    assert [type(event) for event in wire.to_server + wire.to_client] == [e.Authenticate, e.Open, e.Opened]


def test_further_challenges() -> None:
    server, client = ServerConnection(mechanisms="PLAIN X"), new_client(mechanism="x", responses=())
    server.receive_data(client.data_to_send(), 0)
    client.receive_data(server.data_to_send(), 0)
    assert server.receive_data(client.data_to_send(), 0) == [e.Authenticate("x", (), True)]
    server.challenge((("Q", string("more?")),))
    assert client.receive_data(server.data_to_send(), 0) == [
        e.Challenged("PLAIN X", (("Q", string("more?")),))
    ]
    client.respond(GUEST)
    with pytest.raises(LocalProtocolError):
        client.respond(GUEST)
    assert server.receive_data(client.data_to_send(), 0) == [e.Authenticate("x", GUEST, True)]
    with pytest.raises(LocalProtocolError):
        server.opened()


@pytest.mark.parametrize("version, answer", [(1, 1), (2, 1), (255, 1)])
def test_versions(version: int, answer: int) -> None:
    """3.2.2: the smaller version is spoken."""
    server = ServerConnection()
    assert server.receive_data(bytes((0x80, version)), 0) == []
    assert server.data_to_send() == encode_command(m.ConnectionChallenge(answer, "PLAIN"))


@pytest.mark.parametrize("data", [b"\x80\x00", b"AMQP", b"\x10", b"\x81\x01", b"GET"])
def test_no_initiation(data: bytes) -> None:
    """3.2.12: a pause, and no frame."""
    server = ServerConnection(negotiation_pause=3)
    (event,) = server.receive_data(data, 10)
    assert isinstance(event, e.NegotiationFailed)
    assert (server.state, server.pause_until, server.deadline()) == (State.FAILED, 13, 13)
    assert server.receive_data(INITIATION, 11) == []
    server.tick(12.9)
    assert server.state is State.FAILED
    server.tick(13)
    assert (server.closed, server.data_to_send()) == (True, b"")


def started() -> ServerConnection:
    server = ServerConnection(negotiation_pause=3)
    server.receive_data(INITIATION, 0)
    return server


def welcomed() -> ServerConnection:
    server = started()
    server.receive_data(encode_command(m.ConnectionResponse("PLAIN", GUEST)), 0)
    server.tune()
    server.data_to_send()
    return server


FAILURES: list[tuple[Callable[[], ServerConnection], bytes, int, bool]] = [
    (started, encode_command(m.HandleSend(1)), 503, True),
    (started, encode_command(m.ConnectionOpen()), 503, True),
    (started, encode_command(m.ConnectionTune(4096)), 503, True),
    (started, b"\0\0", 501, False),
    (started, b"\x10\x01\x0b", 501, False),
    (started, b"\0\x04\x0b\x01a\xce", 501, False),
    (started, b"\0\x08\x0b\0\0\x03\x01a?\xce", 502, True),
    (welcomed, encode_command(m.ConnectionTune(1023)), 502, True),
    (welcomed, encode_command(m.ConnectionTune(200_000)), 502, True),
    (welcomed, encode_command(m.ConnectionTune(4096, 5000)), 502, True),
    (welcomed, encode_command(m.ConnectionTune(4096, 0, 65_535)), 502, True),
    (welcomed, encode_command(m.ConnectionOpen()), 503, True),
    (welcomed, b"\0\0", 501, True),
]


@pytest.mark.parametrize("prepare, data, code, told", FAILURES)
def test_a_negotiation_that_fails(
    prepare: Callable[[], ServerConnection], data: bytes, code: int, told: bool
) -> None:
    """3.2.12: a pause, then CLOSE, unless the first frame could not be read."""
    server = prepare()
    server.data_to_send()
    (event,) = server.receive_data(data, 1)
    assert isinstance(event, e.NegotiationFailed)
    assert event.reply_code == code
    assert server.data_to_send() == b""
    server.tick(4)
    said = server.data_to_send()
    assert said.startswith(b"\0") is told
    if told:
        assert said[2] == m.ConnectionClose.type
        assert int.from_bytes(said[3:5], "big") == code
    assert server.closed


def test_a_wrong_login() -> None:
    server = started()
    server.receive_data(encode_command(m.ConnectionResponse("none", ())), 0)
    server.data_to_send()
    server.fail(ReplyCode.ACCESS_REFUSED, "no")
    assert server.data_to_send() == b""
    server.tick(3)
    assert server.data_to_send() == encode_command(m.ConnectionClose(403, "no"))


@pytest.mark.interpreted
def test_a_virtual_path_is_refused_at_once() -> None:
    """3.3: errors in OPEN come after the login."""
    wire = Wire()
    wire.server.opened = lambda: wire.server.close(402, "no such path")  # type: ignore[method-assign]
    wire.move()
    assert wire.to_client == [e.Closed(402, "no such path", by_peer=True)]
    assert wire.server.closed
    assert wire.client.state is State.ENDING


def test_client_values() -> None:
    server = ServerConnection(channel_max=0, handle_max=0)
    wire = Wire(server, new_client(frame_max=1024))
    wire.move()
    assert (server.frame_max, server.channel_max, server.handle_max) == (1024, 0, 0)


@pytest.mark.parametrize(
    "said, code",
    [
        ([m.ConnectionChallenge(0, "PLAIN")], 540),
        ([m.ConnectionChallenge(1, "X Y")], 502),
        ([m.ConnectionTune(4096)], 503),
        ([m.ConnectionChallenge(1, "plain"), m.ConnectionTune(1000)], 502),
        ([m.ConnectionChallenge(1, "plain"), m.ConnectionReply(1)], 503),
        ([m.ConnectionChallenge(1, "plain"), m.ConnectionTune(4096), m.ConnectionReply(2)], 503),
        ([m.ConnectionChallenge(1, "plain"), m.ConnectionTune(4096), m.ConnectionTune(4096)], 503),
    ],
)
def test_faults_of_a_server(said: list[m.Command], code: int) -> None:
    client = new_client()
    (event,) = client.receive_data(b"".join(map(encode_command, said)), 0)
    assert isinstance(event, e.Closed)
    assert event.reply_code == code
    assert client.data_to_send().endswith(END)


def test_pipelined_bytes_wait_for_the_decision() -> None:
    server = ServerConnection()
    said = [
        m.ConnectionResponse("PLAIN", GUEST),
        m.ConnectionTune(4096),
        m.ConnectionOpen(),
        m.ChannelOpen(1),
    ]
    data = INITIATION + b"".join(map(encode_command, said))
    assert [type(event) for event in server.receive_data(data, 0)] == [e.Authenticate]
    server.tune()
    assert [type(event) for event in server.receive_data(b"", 0)] == [e.Open]
    server.opened()
    assert server.receive_data(b"", 0) == [e.CommandReceived(m.ChannelOpen(1))]


def test_what_waits_is_limited() -> None:
    server = started()
    server.receive_data(encode_command(m.ConnectionResponse("PLAIN", GUEST)), 0)
    (event,) = server.receive_data(bytes(PAUSED_BYTES_MAX + 1), 0)
    assert isinstance(event, e.NegotiationFailed)


# --- the tables

NEVER_BY_CLIENT: set[type[m.Command]] = {  # 3.2.10, 3.3.9, 3.5.17: what a client never expects
    m.ConnectionResponse,
    m.ConnectionOpen,
    m.ChannelOpen,
    m.ChannelAck,
    m.ChannelCommit,
    m.ChannelRollback,
    m.HandleOpen,
    m.HandleSend,
    m.HandleConsume,
    m.HandleCancel,
    m.HandleFlow,
    m.HandleUnget,
    m.HandleQuery,
    m.HandleBrowse,
}
NEVER_BY_SERVER: set[type[m.Command]] = {
    m.ConnectionChallenge,
    m.ConnectionReply,
    m.ChannelReply,
    m.HandleCreated,
    m.HandleNotify,
    m.HandleIndex,
    m.HandleReply,
}


def test_the_tables_are_complete() -> None:
    for direction, never in ((m.TO_SERVER, NEVER_BY_SERVER), (m.TO_CLIENT, NEVER_BY_CLIENT)):
        rules = RULES[direction]
        assert set(rules) == {*ChannelState, *HandleState}
        for states, commands in ((ChannelState, CHANNEL_COMMANDS), (HandleState, HANDLE_COMMANDS)):
            for state in states:
                assert set(rules[state]) == commands
                for kind, rule in rules[state].items():
                    assert rule.clause
                    if kind in never:
                        assert rule[::2] == (Answer.REFUSE, Scope.CONNECTION)
                        assert rule.code == ReplyCode.COMMAND_NOT_VALID


def in_order(kinds: set[type[m.Command]]) -> list[type[m.Command]]:
    return [kind for kind in m.COMMANDS.values() if kind in kinds]


def sample(kind: type[m.Command]) -> bytes:
    """A command of its kind on channel 1 and handle 1, with a fragment where it needs one."""
    values: dict[str, Any] = {}
    fields = {name for _, name in kind.layout}
    for name in ("channel_id", "handle_id"):
        if name in fields:
            values[name] = 1
    fragment = b""
    if kind.fragment:
        fragment = b"\0\0\0\2" + NAMED + b"ab"
        values["fragment_size"] = len(fragment)
    return encode_command(kind(**values)) + fragment


@pytest.mark.parametrize("kind", in_order(NEVER_BY_SERVER))
def test_never_expected_by_a_server(kind: type[m.Command]) -> None:
    for wire in (open_wire(), queue_wire()):
        never(wire.server, wire, kind)


@pytest.mark.parametrize("kind", in_order(NEVER_BY_CLIENT))
def test_never_expected_by_a_client(kind: type[m.Command]) -> None:
    for wire in (open_wire(), queue_wire()):
        never(wire.client, wire, kind)


def never(side: Connection, wire: Wire, kind: type[m.Command]) -> None:
    """Answered by CONNECTION CLOSE 503, behind which the handshake still works, fragments and all."""
    data = sample(kind)
    (event,) = side.receive_data(data, 0)
    assert isinstance(event, e.Closed)
    assert (event.reply_code, event.by_peer) == (ReplyCode.COMMAND_NOT_VALID, False)
    assert side.receive_data(data + encode_command(m.ConnectionClose()), 0) == []
    assert side.closed


def in_order(kinds: Iterable[type[m.Command]]) -> list[type[m.Command]]:
    """Every process that runs these tests must name the rows alike."""
    return sorted(kinds, key=lambda kind: kind.__name__)


SERVER_ROWS = [
    # state of channel 1 and handle 1, command, scope and code of the answer; None: it is taken
    ("none", m.ChannelOpen, None, "3.3.9"),
    ("none", m.ChannelAck, (Scope.CONNECTION, 504), "5"),
    ("none", m.ChannelCommit, (Scope.CONNECTION, 504), "5"),
    ("none", m.ChannelRollback, (Scope.CONNECTION, 504), "5"),
    ("none", m.ChannelClose, (Scope.CONNECTION, 504), "5"),
    ("none", m.HandleOpen, (Scope.CONNECTION, 504), "5"),
    *(
        ("none", kind, (Scope.CONNECTION, 505), "3.5.17")
        for kind in (m.HandleSend, m.HandleConsume, m.HandleCancel, m.HandleFlow, m.HandleUnget)
    ),
    *(
        ("none", kind, (Scope.CONNECTION, 505), "3.5.17")
        for kind in (m.HandleQuery, m.HandleBrowse, m.HandlePrepare, m.HandleReady, m.HandleClose)
    ),
    ("open", m.ChannelOpen, (Scope.CHANNEL, 503), "3.3.9"),
    ("open", m.ChannelAck, None, "3.3.9"),
    ("open", m.ChannelCommit, (Scope.CHANNEL, 503), "5: the channel is not transacted"),
    ("open", m.ChannelRollback, (Scope.CHANNEL, 503), "5: the channel is not transacted"),
    ("open", m.ChannelClose, None, "3.3.9"),
    ("open", m.HandleOpen, (Scope.HANDLE, 503), "3.5.17"),
    ("open", m.HandleSend, None, "3.5.17"),
    ("open", m.HandleConsume, None, "3.5.17"),
    ("open", m.HandleCancel, (Scope.HANDLE, 502), "6: only topics have durable subscriptions"),
    ("open", m.HandleFlow, None, "3.5.17"),
    ("open", m.HandleUnget, None, "3.5.17"),
    ("open", m.HandleQuery, None, "3.5.17"),
    ("open", m.HandleBrowse, None, "3.5.17"),
    ("open", m.HandlePrepare, (Scope.CHANNEL, 503), "7: the channel is not restartable"),
    ("open", m.HandleReady, (Scope.CONNECTION, 503), "3.5.17: expected after PREPARE"),
    ("open", m.HandleClose, None, "3.5.17"),
    ("gone", m.ChannelClose, "nothing", "3.3.7: it may have been said twice"),
    ("gone", m.ChannelAck, (Scope.CONNECTION, 504), "5"),
    ("gone", m.ChannelOpen, None, "5: the number can be used again"),
    *(("closing", kind, "nothing", "3.3.7, 3.5.16") for kind in in_order(CHANNEL_COMMANDS - NEVER_BY_SERVER)),
    *(("closing", kind, "nothing", "3.5.16") for kind in in_order(HANDLE_COMMANDS - NEVER_BY_SERVER)),
]


def in_state(state: str) -> Wire:
    wire = open_wire() if state == "none" else queue_wire()
    if state == "gone":
        wire.client.close_channel(1)
        wire.move()
    elif state == "closing":
        wire.server.close_channel(1, 404)
    wire.server.data_to_send()
    wire.take()
    return wire


def reported(events: list[e.Event]) -> Any:
    """(scope, code) of the fault that the events tell of; None when something was taken."""
    if not events:
        return "nothing"
    (event,) = events
    if isinstance(event, e.Closed | e.ChannelClosed | e.HandleClosed) and not event.by_peer:
        scope = {e.Closed: Scope.CONNECTION, e.ChannelClosed: Scope.CHANNEL, e.HandleClosed: Scope.HANDLE}
        return scope[type(event)], event.reply_code
    return None


@pytest.mark.parametrize("state, kind, answer, clause", SERVER_ROWS)
def test_what_a_server_answers(state: str, kind: type[m.Command], answer: Any, clause: str) -> None:
    wire = in_state(state)
    events = wire.server.receive_data(sample(kind), 0)
    if (state, kind) == ("closing", m.ChannelClose):
        assert events == [e.Released(1, 0)]
    elif (state, kind) == ("closing", m.HandleClose):
        assert events == [e.Released(0, 1)]
    else:
        assert reported(events) == answer, clause
    # Whatever became of the command, its fragment has been passed over.
    assert wire.server.receive_data(encode_command(m.ConnectionPing(respond=True)), 0) == []


CLIENT_ROWS = [
    ("none", m.ChannelReply, (Scope.CONNECTION, 504), "5"),
    ("none", m.ChannelClose, (Scope.CONNECTION, 504), "5"),
    *(
        ("none", kind, (Scope.CONNECTION, 505), "3.5.17")
        for kind in (m.HandleCreated, m.HandleNotify, m.HandleIndex, m.HandleReply, m.HandlePrepare)
    ),
    ("open", m.ChannelReply, (Scope.CONNECTION, 503), "3.3.9: after a command with a tag"),
    ("open", m.ChannelClose, None, "3.3.9"),
    ("open", m.HandleCreated, (Scope.CONNECTION, 503), "3.5.17: after opening a temporary one"),
    ("open", m.HandleNotify, (Scope.CONNECTION, 503), "3.5.17: after CONSUME or BROWSE"),
    ("open", m.HandleIndex, (Scope.CONNECTION, 503), "3.5.17: after QUERY"),
    ("open", m.HandleReply, (Scope.CONNECTION, 503), "3.5.17: after a command with a tag"),
    ("open", m.HandlePrepare, (Scope.CHANNEL, 503), "7: the channel is not restartable"),
    ("open", m.HandleReady, (Scope.CONNECTION, 503), "3.5.17: after PREPARE"),
    ("open", m.HandleClose, None, "3.5.17"),
    *(("closing", kind, "nothing", "3.3.7") for kind in (m.ChannelReply, m.HandleNotify, m.HandleReply)),
]


@pytest.mark.parametrize("state, kind, answer, clause", CLIENT_ROWS)
def test_what_a_client_answers(state: str, kind: type[m.Command], answer: Any, clause: str) -> None:
    wire = open_wire() if state == "none" else queue_wire()
    if state == "closing":
        wire.client.close_channel(1)
    assert reported(wire.client.receive_data(sample(kind), 0)) == answer, clause


OPENINGS = [
    (m.HandleOpen(1, 9, 0), (Scope.HANDLE, 401), "6: no such service"),
    (m.HandleOpen(1, 9, 4), (Scope.HANDLE, 401), "6: no such service"),
    (m.HandleOpen(1, 9, 3, consumer=True), (Scope.HANDLE, 502), "6: not for peers"),
    (m.HandleOpen(1, 9, 3, browser=True), (Scope.HANDLE, 502), "6: not for peers"),
    (m.HandleOpen(1, 9, 3, temporary=True), (Scope.HANDLE, 502), "6: not for peers"),
    (m.HandleOpen(0, 9), (Scope.CONNECTION, 502), "5: channel-id 0"),
    (m.HandleOpen(2, 9), (Scope.CONNECTION, 504), "5: the channel is not open"),
    (m.HandleOpen(1, 0), None, "6: handle-id 0 is accepted"),
    (m.ChannelOpen(0), (Scope.CONNECTION, 502), "5: channel-id 0"),
]


@pytest.mark.parametrize("command, answer, clause", OPENINGS)
def test_openings(command: m.Command, answer: Any, clause: str) -> None:
    wire = queue_wire()
    assert reported(wire.server.receive_data(encode_command(command), 0)) == answer, clause


RIGHTS = [
    (1, m.HandleSend, 403),
    (1, m.HandleConsume, 403),
    (1, m.HandleQuery, 403),
    (1, m.HandleBrowse, 403),
    (1, m.HandleFlow, None),
    (1, m.HandleUnget, None),
    (2, m.HandleUnget, 503),
    (2, m.HandleCancel, None),
    (3, m.HandleSend, None),
    *((3, kind, 503) for kind in (m.HandleConsume, m.HandleCancel, m.HandleFlow, m.HandleUnget)),
    *((3, kind, 503) for kind in (m.HandleQuery, m.HandleBrowse)),
]


@pytest.mark.parametrize("service, kind, code", RIGHTS)
def test_what_a_handle_without_rights_may(service: int, kind: type[m.Command], code: int | None) -> None:
    """6: access requests, and the services that do not know a command."""
    wire = open_wire()
    data = encode_command(m.ChannelOpen(1)) + encode_command(m.HandleOpen(1, 1, service))
    wire.server.receive_data(data, 0)
    events = wire.server.receive_data(sample(kind), 0)
    assert reported(events) == (code and (Scope.HANDLE, code))


def test_limits_count_what_is_open() -> None:
    wire = open_wire(channel_max=2, handle_max=2)
    server = wire.server
    commands = [
        m.ChannelOpen(7),
        m.HandleOpen(7, 1),
        m.HandleOpen(7, 9),
        m.HandleClose(1),
        m.HandleOpen(7, 1),
    ]
    assert len(server.receive_data(b"".join(map(encode_command, commands)), 0)) == 5
    assert reported(server.receive_data(encode_command(m.HandleOpen(7, 3)), 0)) == (Scope.CHANNEL, 506)
    server.receive_data(encode_command(m.ChannelClose(7)), 0)
    server.receive_data(encode_command(m.ChannelOpen(1)) + encode_command(m.ChannelOpen(2)), 0)
    assert reported(server.receive_data(encode_command(m.ChannelOpen(3)), 0)) == (Scope.CONNECTION, 506)


def test_a_client_keeps_to_the_limits() -> None:
    wire = open_wire(channel_max=1, handle_max=1)
    with pytest.raises(LocalProtocolError):
        wire.client.open_handle(m.HandleOpen(1))
    assert wire.client.open_channel() == 1
    with pytest.raises(LocalProtocolError):
        wire.client.open_channel()
    assert wire.client.open_handle(m.HandleOpen(1)) == 1
    with pytest.raises(LocalProtocolError):
        wire.client.open_handle(m.HandleOpen(1))
    with pytest.raises(LocalProtocolError):
        new_client().open_channel()
