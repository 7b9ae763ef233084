"""Scripts of the connection: greeting, login, tuning, virtual hosts, closing, frames out of place."""

from __future__ import annotations

from gateway.protocols.amqp091 import methods as m
from gateway.protocols.amqp091.codec import encode_method_frame
from tests.interop.oracle.scripts import bare, script
from tests.interop.oracle.wire import BODY, HEADER, HEARTBEAT, Wire, frame

OPEN = m.ConnectionOpen("/")


@bare
def another_protocol_is_answered_with_our_header(a: Wire) -> None:
    a.data(b"HTTP/1.1").hear(2)


@bare
def another_version_is_answered_with_our_header(a: Wire) -> None:
    a.data(b"AMQP\x03\x01\x00\x00").hear(2)


@bare
def the_header_of_0_9(a: Wire) -> None:
    a.data(b"AMQP\x01\x01\x00\x09").hear()


@bare
def the_header_of_old_python_clients(a: Wire) -> None:
    a.data(b"AMQP\x01\x01\x09\x01").hear()


@bare
def the_handshake(a: Wire) -> None:
    a.login().tune().call(OPEN, channel=0).call(m.ChannelOpen())


@bare
def login_with_amqplain(a: Wire) -> None:
    a.login(mechanism="AMQPLAIN").tune().call(OPEN, channel=0)


@bare
def a_wrong_password(a: Wire) -> None:
    a.login(password="wrong").hear()


@bare
def a_wrong_password_of_a_client_that_does_not_understand_why(a: Wire) -> None:
    a.login(password="wrong", capabilities=())


@bare
def a_mechanism_that_is_not_offered(a: Wire) -> None:
    a.login(mechanism="GSSAPI").hear()


@bare
def an_unknown_virtual_host(a: Wire) -> None:
    a.login().tune().call(m.ConnectionOpen("nowhere"), channel=0).hear()


@bare
def a_frame_max_above_what_was_offered(a: Wire) -> None:
    a.login().tune(frame_max=131_073).hear(2)


@bare
def a_frame_max_below_the_least(a: Wire) -> None:
    a.login().tune(frame_max=4_095).hear(2)


@bare
def a_channel_max_above_what_was_offered(a: Wire) -> None:
    a.login().tune(channel_max=2_048).hear(2)


@bare
def no_limit_of_frames_where_one_was_offered(a: Wire) -> None:
    a.login().tune(frame_max=0).hear(2)


@bare
def no_limit_of_channels_where_one_was_offered(a: Wire) -> None:
    a.login().tune(channel_max=0).hear(2)


@bare
def more_channels_than_agreed(a: Wire) -> None:
    a.login().tune(channel_max=2).call(OPEN, channel=0)
    for number in (1, 7, 3):
        a.call(m.ChannelOpen(), channel=number)


@bare
def open_before_the_login(a: Wire) -> None:
    a.header().call(OPEN, channel=0).hear()


@bare
def a_channel_before_the_connection_is_open(a: Wire) -> None:
    a.login().tune().call(m.ChannelOpen()).hear()


@script
def opening_the_connection_twice(a: Wire) -> None:
    a.call(OPEN, channel=0).hear()


@script
def a_channel_opened_twice(a: Wire) -> None:
    a.call(m.ChannelOpen()).hear()


@script
def closing_a_channel_and_opening_it_again(a: Wire) -> None:
    a.call(m.ChannelClose(200, "", 0, 0), m.ChannelOpen(), m.QueueDeclare(exclusive=True))


@script
def closing_the_connection(a: Wire) -> None:
    a.call(m.ConnectionClose(200, "", 0, 0), channel=0)


@script
def a_method_on_a_channel_that_is_not_open(a: Wire) -> None:
    a.call(m.QueueDeclare("q"), channel=7).hear()


@script
def closing_a_channel_that_is_not_open(a: Wire) -> None:
    a.call(m.ChannelClose(200, "", 0, 0), channel=7).hear()


@script
def a_close_ok_that_nobody_asked_for(a: Wire) -> None:
    a.say(m.ChannelCloseOk()).silence()


@script
def a_method_of_channels_on_channel_zero(a: Wire) -> None:
    a.call(m.QueueDeclare("q"), channel=0).hear()


@script
def a_method_of_connections_on_a_channel(a: Wire) -> None:
    a.call(OPEN, channel=1).hear()


@script
def a_method_that_does_not_exist(a: Wire) -> None:
    a.data(frame(1, 1, b"\x00\x3c\x00\xc8")).hear(2)


@script
def a_class_that_does_not_exist(a: Wire) -> None:
    a.data(frame(1, 1, b"\x00\xc8\x00\x0a")).hear(2)


@script
def a_method_only_servers_say(a: Wire) -> None:
    a.call(m.QueueDeclareOk("q", 0, 0)).hear()


@script
def a_method_cut_short(a: Wire) -> None:
    a.data(frame(1, 1, b"\x00\x32\x00\x0a\x00\x00\x09q")).hear(2)


@script
def a_frame_that_does_not_end(a: Wire) -> None:
    data = encode_method_frame(1, m.QueueDeclare("q"))
    a.data(data[:-1] + b"\x00").hear(2)


@script
def a_frame_of_an_unknown_type(a: Wire) -> None:
    a.data(frame(5, 1, b"")).hear(2)


@script
def a_heartbeat_on_a_channel(a: Wire) -> None:
    a.data(frame(HEARTBEAT, 1, b"")).silence()


@script
def a_header_without_a_method(a: Wire) -> None:
    a.data(frame(HEADER, 1, b"\x00\x3c\x00\x00" + bytes(10))).hear(2)


@script
def a_body_without_a_header(a: Wire) -> None:
    a.data(frame(BODY, 1, b"x")).hear(2)


@script
def a_method_where_a_header_should_be(a: Wire) -> None:
    a.say(m.BasicPublish("", "q"), m.QueueDeclare("q")).hear(2)


@script
def a_header_of_another_class(a: Wire) -> None:
    a.say(m.BasicPublish("", "q")).data(frame(HEADER, 1, b"\x00\x32\x00\x00" + bytes(10))).hear(2)


@script
def a_body_in_many_frames_and_none(a: Wire) -> None:
    a.call(m.QueueDeclare("many", exclusive=True))
    header = b"\x00\x3c\x00\x00" + (3).to_bytes(8, "big") + b"\0\0"
    pieces = [frame(BODY, 1, piece) for piece in (b"x", b"", b"y", b"z")]
    a.say(m.BasicPublish("", "many")).data(frame(HEADER, 1, header) + b"".join(pieces))
    a.publish("", "many", b"").call(m.BasicGet("many", True), m.BasicGet("many", True))


@script
def publishes_interleaved_across_channels(a: Wire) -> None:
    a.channel(2).call(m.QueueDeclare("woven", exclusive=True))
    header = b"\x00\x3c\x00\x00" + (2).to_bytes(8, "big") + b"\0\0"
    a.say(m.BasicPublish("", "woven")).say(m.BasicPublish("", "woven"), channel=2)
    a.data(frame(HEADER, 2, header) + frame(HEADER, 1, header))
    a.data(frame(BODY, 1, b"a") + frame(BODY, 2, b"bb") + frame(BODY, 1, b"a"))
    # Channels of one connection are in no order among themselves: each has to have said that it came so far.
    a.call(m.BasicQos(0, 1, False)).call(m.BasicQos(0, 1, False), channel=2).call(m.QueuePurge("woven"))


@script
def a_frame_larger_than_agreed(a: Wire) -> None:
    a.data(frame(BODY, 1, bytes(131_073))).hear(2)


@script
def updating_the_secret(a: Wire) -> None:
    a.call(m.ConnectionUpdateSecret(b"guest", "it expires"), channel=0)


@script
def access_as_clients_of_0_8_ask_for_it(a: Wire) -> None:
    a.call(m.AccessRequest("/data", False, False, True, True, True))


@script
def flow_is_answered(a: Wire) -> None:
    a.call(m.ChannelFlow(True))


@script
def stopping_the_flow(a: Wire) -> None:
    a.call(m.ChannelFlow(False)).hear()


@bare
def heartbeats_are_sent_to_a_client_that_wants_them(a: Wire) -> None:
    a.login().tune(heartbeat=1).call(OPEN, channel=0).hear()


@bare
def a_client_that_falls_silent_is_let_go(a: Wire) -> None:
    a.login().tune(heartbeat=1).call(OPEN, channel=0)
    while a.log[-1].name != "end":
        a.hear()
    a.log[:] = [heard for heard in a.log if heard.name != "heartbeat"]


@script
def two_faults_in_a_row_on_one_channel(a: Wire) -> None:
    a.say(m.BasicConsume("none"), m.BasicConsume("none")).hear().silence()


@script
def a_fault_on_one_channel_leaves_the_others(a: Wire) -> None:
    a.channel(2).call(m.BasicGet("none")).call(m.QueueDeclare(exclusive=True), channel=2)
    a.channel(1).call(m.QueueDeclare(exclusive=True))
