"""A limit, with its reason, on everything that a peer can make grow.

The defaults let a pod of 512 MiB serve ten thousand devices. A listener may override them by the same names.
"""

from __future__ import annotations

from typing import Literal

from pydantic import ConfigDict, Field

from gateway.documented import Documented


class Section(Documented):
    """A part of the configuration: strict in its types, not changed once read, without unknown keys."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")


class Limits(Section):
    """How much of everything. Sizes are octets, times are seconds.

    What is held of messages counts with their bodies, their properties and 256 octets for each, which is what
    one costs that is empty (`Message.octets`).
    """

    memory_bytes_max: int = Field(0, ge=0)
    """Memory of the process; above it publishers are not read until consumers have made room. 0: six tenths
    of what its control group or the machine has. A third above it, what cannot be stopped is refused."""
    memory_per_user_share: float = Field(0.25, gt=0, le=1)
    """Section of `memory_bytes_max` that messages in one user's queues, subscriptions and sessions, and those
    that its AMQP clients have not acknowledged, may take when three quarters of it are used: so that one user
    alone does not bring it to where everybody waits."""
    memory_per_address_share: float = Field(0.25, gt=0, le=1)
    """The same of one address (of IPv6: one /64), in sessions and of what is not acknowledged. This machine
    is not counted."""
    connections_max: int = Field(10_000, ge=1)
    """Connections of one listener: each costs a descriptor and some 10 KiB."""
    connections_per_address_max: int = Field(0, ge=0)
    """The same of one address (of IPv6: one /64). 0: nine tenths of `connections_max`, so that somebody else
    always gets in, and clients on this machine are not counted."""
    connections_per_user_max: int = Field(0, ge=0)
    """The same of one user name; that of anonymous clients is empty."""
    connects_per_second_max: float = Field(0.0, ge=0)
    """New connections of one address to one listener; as many may come at once. 0: any number."""
    descriptors_reserved: int = Field(128, ge=16)
    """Descriptors that listeners leave to HTTP, links and the store (at most a quarter of all): connections
    are refused before there is none left."""
    connect_timeout_secs: float = Field(10.0, gt=0)
    """From accepting a socket to the end of the greeting: whoever says nothing holds a descriptor."""
    connect_bytes_max: int = Field(196_608, ge=256)
    """One packet before authentication: a stranger may not make us reserve more. A CONNECT with a will and a
    password of 64 KiB each fits. Of one address `connections_per_address_max` such packets may be begun, each
    for `connect_timeout_secs`."""
    heartbeat_secs: int = Field(60, ge=0, le=65_535)
    """AMQP heartbeat that we propose; 0 is none. A peer that vanished holds messages for twice as long."""
    keep_alive_secs_max: int = Field(65_535, ge=1, le=65_535)
    """MQTT keep-alive that we grant; a longer or absent one is lowered to it (MQTT 5: Server Keep Alive)."""

    message_bytes_max: int = Field(16 * 1024 * 1024, ge=1, le=268_435_455)
    """The body of one message that is held whole: all of MQTT, of links, and what crosses a route; 256 MiB is
    the most that an MQTT packet can carry. Beyond it: 0x95, or a rejection."""
    amqp_message_bytes_max: int = Field(128 * 1024 * 1024, ge=1, le=0xFFFF_FFFF)
    """The body of one message of an AMQP 0-9-1 client; beyond it its channel is closed with 406. What is over
    `message_bytes_max` is written to the folder `spool` of the store as it comes, and stays there."""
    fast_message_bytes_max: int = Field(256 * 1024 * 1024, ge=1, le=0xFFFF_FFFF)
    """The body of one AMQP/Fast message; routes to other endpoints take `message_bytes_max` of it at most."""
    fast_memory_bytes_max: int = Field(16 * 1024 * 1024, ge=1024 * 1024, le=268_435_455)
    """The body of one AMQP/Fast message that arrives in fragments and is held in memory; a larger one is
    written to the folder `spool` of the store as it comes, and stays there."""
    fast_memory_total_bytes_max: int = Field(64 * 1024 * 1024, ge=0)
    """The same of all that arrive at once; beyond it those over 1 MiB are written to the disk, too."""
    spool_bytes_max: int = Field(8 * 1024**3, ge=1)
    """Octets on disk of bodies that are not held in memory, those that arrive or have been broken off too."""
    fast_partials_max: int = Field(1_000, ge=1)
    """Restartable AMQP/Fast transfers that were broken off and may be resumed; beyond it the oldest go."""
    fast_partial_bytes_max: int = Field(2 * 1024**3, ge=0)
    """Octets of all of them; beyond it the oldest go."""
    fast_partial_age_secs: float = Field(24 * 3_600.0, gt=0)
    """How long such a transfer waits for its sender."""
    properties_max: int = Field(1_000, ge=1)
    """User properties of one MQTT packet, or entries of one message's header table, nested ones included: to
    read one costs as much as to read a small message. Beyond it: 0x97, a channel closed with 406, a handle
    with 542; of a method's table, the connection with 501. What a link's broker sends beyond it becomes a
    dead letter, or goes back as rejected to a broker of AMQP 0-9-1."""
    properties_bytes_max: int = Field(131_072, ge=256)
    """Octets of all properties of one MQTT packet or one message: who needs more has content."""
    filters_max: int = Field(1_000, ge=1)
    """Topic filters in one SUBSCRIBE or UNSUBSCRIBE: all of them are dealt with in one go. Beyond it:
    0x97."""
    frame_bytes_max: int = Field(131_072, ge=4_096, le=16 * 1024 * 1024)
    """AMQP frame-max that we propose: larger frames hold up their connection's heartbeats."""
    output_bytes_max: int = Field(32 * 1024 * 1024, ge=65_536)
    """Written for one connection and not yet taken by its socket: a slow reader gets no more than that. From
    half of it on (with two messages) nothing more of what the peer says is read."""
    receive_bytes_per_sec_max: int = Field(0, ge=0)
    """Octets per second that are read of one connection, 0 for any number: who sends more is not read for a
    while. A second's worth may come at once."""
    receive_messages_per_sec_max: int = Field(0, ge=0)
    """The same in messages that its client publishes."""
    topic_levels_max: int = Field(200, ge=1)
    """Levels of one MQTT topic or filter: each is a step of matching. Beyond it a message is refused (MQTT 5:
    0x90; 3.x: acknowledged, and a dead letter), a filter likewise (0x8F, 0x80), a client with such a will
    not let in."""
    topic_filter_bytes_max: int = Field(4_096, ge=1, le=65_535)
    """Bytes of one MQTT topic filter: it is kept for as long as its session. Beyond it: 0x8F; MQTT 3.1.1:
    0x80."""
    client_id_bytes_max: int = Field(1_024, ge=23, le=65_535)
    """Bytes of an MQTT client identifier: a session is kept under it. Beyond it: 0x85; MQTT 3.x: 2."""
    arguments_max: int = Field(64, ge=16)
    """Arguments of one AMQP queue, exchange or binding, nested ones included: they are kept, and a headers
    exchange compares them with each message. Beyond it: 406 on the channel."""
    matching_steps_per_user_max: int = Field(250_000, ge=1_000)
    """Steps (of some 30 ns) that the bindings of one user name in one virtual host, or its MQTT
    subscriptions, may add to the matching of one message at worst. Headers bindings that share each of their
    arguments with many others, patterns with several wildcards, and members of shared subscriptions (12 each)
    add steps; others add few or none. Beyond it: 506 (AMQP), 0x97 (MQTT)."""
    definitions_bytes_max: int = Field(0, ge=0)
    """Bytes of the names and arguments of all queues, exchanges, bindings, subscriptions and sessions that
    clients make. Beyond it: 506 (AMQP, AMQP/Fast), 0x97 (MQTT). 0: a quarter of `memory_bytes_max`."""
    definitions_per_user_share: float = Field(0.5, gt=0, le=1)
    """Fraction of `definitions_bytes_max` that the definitions of one user name may take; that of anonymous
    clients is empty."""
    user_share: float = Field(0.9, gt=0, le=1)
    """Fraction that one user name may have of retained messages, bodies on disk, dead letters, event
    streams, and lines of the audit log in a second, in number and in bytes. It applies when
    there may be more than one user: two users, or a back end that is not `users`. Beyond it: 0x97 (MQTT 5),
    406 (AMQP 0-9-1), 506 (AMQP/Fast), 429 (HTTP). Where old entries make room for new ones (dead letters
    without a source that keeps them, transfers), those of a user with more than an equal part go first."""
    hops_max: int = Field(8, ge=1, le=255)
    """Routes that one message may cross: two gateways that feed each other would never stop."""

    inflight_max: int = Field(1_000, ge=1, le=65_535)
    """Unacknowledged messages per MQTT connection and direction (Receive Maximum): each is held whole."""
    topic_alias_max: int = Field(64, ge=0, le=65_535)
    """MQTT 5 topic aliases per connection and direction: each keeps a topic."""
    channels_max: int = Field(2_047, ge=1, le=65_535)
    """AMQP channels per connection: each keeps its unacknowledged deliveries and unconfirmed publishes."""
    handles_max: int = Field(8_192, ge=1, le=65_535)
    """AMQP/Fast handles per connection: each keeps its consumers and what its names lead to."""
    transaction_messages_max: int = Field(100_000, ge=1)
    """Messages that an AMQP or AMQP/Fast channel may send before it commits: they wait in memory."""
    transaction_bytes_max: int = Field(64 * 1024 * 1024, ge=1)
    """The same in octets, without bodies on disk."""
    prefetch_max: int = Field(10_000, ge=1, le=65_535)
    """Unacknowledged deliveries to one AMQP consumer, also to one that asked for no limit; and to one channel
    that asks for more with `basic.get`."""
    unacknowledged_bytes_max: int = Field(128 * 1024 * 1024, ge=1)
    """Octets of what one AMQP or AMQP/Fast connection has not acknowledged: it gets no more until it does."""
    consumers_max: int = Field(1_000, ge=1)
    """AMQP consumers per connection."""

    sessions_max: int = Field(50_000, ge=1)
    """MQTT sessions, connected or not, and durable subscriptions of one AMQP/Fast virtual host: a client
    identifier costs nothing to invent."""
    sessions_per_address_max: int = Field(0, ge=0)
    """MQTT sessions that were opened from one address (of IPv6: one /64). 0: nine tenths of all."""
    sessions_per_user_max: int = Field(0, ge=0)
    """MQTT sessions of one user name, and durable AMQP/Fast subscriptions, likewise."""
    sessions_policy: Literal["expire_soonest", "refuse"] = "expire_soonest"
    """MQTT: at a limit of sessions. `expire_soonest`: of those whose client is away the one goes that would
    expire first, among those of whoever has most; `refuse`: the new client is refused."""
    session_full: Literal["hold", "drop"] = "hold"
    """MQTT: what a full session of a connected client does: `hold` stops reading its publishers, `drop` drops
    the newest messages for that client, and they are counted."""
    stall_secs: float = Field(30.0, gt=0)
    """MQTT: how long publishers are held for a full session whose client takes nothing; then it is
    disconnected (0x97, counted as `quota_exceeded`), and holds nobody again before it has taken half."""
    session_delay_secs: float = Field(0.015, ge=0, le=1)
    """MQTT, with `session_full: hold`: publishers are held when what waits for a connected client would take
    it longer than this at the rate at which it takes messages, so that a client that is a little slower than
    they are stays that little behind. What would take it longer than a second anyway, of a slow client or one
    that was away, holds nobody before the session is full. 0: nothing does before that."""
    session_expiry_secs_max: int = Field(7 * 24 * 3_600, ge=0)
    """How long an MQTT session is kept for a client that is away."""
    subscriptions_max: int = Field(1_000, ge=1)
    """Subscriptions of one MQTT session."""
    subscriptions_total_max: int = Field(1_000_000, ge=1)
    """Subscriptions of all MQTT sessions: each is a node of the topic tree."""
    subscriptions_per_user_max: int = Field(0, ge=0)
    """The same of one user name. 0: nine tenths of the total."""
    retained_messages_max: int = Field(100_000, ge=0)
    """MQTT topics with a retained message: they stay until they expire or are cleared. Beyond, publishers are
    refused (MQTT 5: 0x97)."""
    retained_bytes_max: int = Field(256 * 1024 * 1024, ge=0)
    """Octets of all retained messages. Beyond, publishers are refused, and the topic keeps what it has."""

    queues_max: int = Field(10_000, ge=1)
    """AMQP queues of the embedded broker, and AMQP/Fast queues of one virtual host."""
    queues_per_user_max: int = Field(0, ge=0)
    """AMQP queues, and AMQP/Fast queues and topics, that one user name has made in one virtual host. 0: nine
    tenths of `queues_max` or `topics_max`."""
    topics_max: int = Field(10_000, ge=1)
    """AMQP/Fast topics of one virtual host: a name that a client uses is remembered."""
    exchanges_max: int = Field(1_000, ge=1)
    """AMQP exchanges of the embedded broker."""
    bindings_max: int = Field(100_000, ge=1)
    """AMQP bindings of the embedded broker: each takes part in matching."""
    exchanges_per_user_max: int = Field(0, ge=0)
    """AMQP exchanges that one user name has made in one virtual host. 0: nine tenths of `exchanges_max`."""
    bindings_per_user_max: int = Field(0, ge=0)
    """AMQP bindings of one user name's queues and exchanges in one virtual host. 0: nine tenths of
    `bindings_max`."""
    queue_messages_max: int = Field(1_000_000, ge=1)
    """Messages in one queue or one session; beyond it publishers are refused or wait."""
    queue_bytes_max: int = Field(512 * 1024 * 1024, ge=1)
    """Octets in one queue or one session."""
    queue_memory_messages_max: int = Field(100_000, ge=1)
    """Messages of one durable queue or session that are held in memory; the others wait on disk alone."""
    queue_memory_bytes_max: int = Field(64 * 1024 * 1024, ge=1)
    """The same in octets."""
    store_pending_bytes_max: int = Field(64 * 1024 * 1024, ge=65_536)
    """Octets that wait for the disk; beyond it publishers are not read until it has caught up."""
    dead_letters_max: int = Field(10_000, ge=0)
    """Dead letters kept; beyond it messages stay with their sources."""
    dead_letters_bytes_max: int = Field(64 * 1024 * 1024, ge=0)
    """Octets of all of them."""
    cache_entries_max: int = Field(100_000, ge=16)
    """Addresses that a listener or a link remembers the routes of, of some 700 octets each; the oldest go."""

    def overridden_by(self, other: Limits | None) -> Limits:
        """These limits with those that `other` sets itself."""
        if other is None:
            return self
        return self.model_copy(update={name: getattr(other, name) for name in other.model_fields_set})
