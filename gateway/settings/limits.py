"""Section `limits` of the configuration: a limit of everything that a client or a broker can make grow.

`Section` is the strict base class of all configuration sections. `Limits` has one field for each limit; the
docstring of a field gives the unit, the reason and the response of each protocol beyond the limit. The
defaults let a pod with 512 MiB of memory serve ten thousand devices. A listener may override limits by the
same names in its own `limits` section. This module only holds the values: the broker and the listeners
enforce them.
"""

from __future__ import annotations

from typing import Literal

from pydantic import ConfigDict, Field

from gateway.model_docs import Documented


class Section(Documented):
    """Base class of configuration sections.

    Objects are immutable. Types are strict: no value is converted. Unknown keys are errors.
    """

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")


class Limits(Section):
    """Limits of memory, connections, sessions, queues and messages.

    Sizes are in bytes, times in seconds. The size of a stored message is the sum of its body, its properties
    and 256 bytes, which is the memory of an empty message (`Message.byte_count`).
    """

    memory_bytes_max: int = Field(0, ge=0)
    """Memory of the process in bytes. Above it the gateway stops reading from publishers until consumers have
    freed memory; one third above it, publishes that cannot be paused are refused. 0: 60 % of the memory of
    the control group or the machine."""
    memory_per_user_share: float = Field(0.25, gt=0, le=1)
    """Fraction of `memory_bytes_max` that one user may occupy once 75 % of it are used: with messages in its
    queues, subscriptions and sessions, unacknowledged messages of its AMQP clients, uncommitted transactions,
    and publishes of its clients that wait for a full queue. Beyond it, queues on disk leave new messages on
    disk, other queues count as full, clients with waiting publishes are not read, and a transaction may be
    committed but not grow: its channel is closed with 406, or 506 (AMQP/Fast)."""
    memory_per_address_share: float = Field(0.25, gt=0, le=1)
    """Fraction of `memory_bytes_max` that clients of one address (of IPv6: one /64) may occupy in the same
    way: in sessions, with unacknowledged messages, and with publishes that wait for a full queue. This
    machine is not counted."""
    connections_max: int = Field(10_000, ge=1)
    """Connections of one listener. Each takes a file descriptor and at least 2.6 KiB."""
    connections_per_address_max: int = Field(0, ge=0)
    """Connections of one address (of IPv6: one /64) to one listener. 0: 90 % of `connections_max`, so that
    other addresses can always connect, and clients on this machine are not counted."""
    connections_per_user_max: int = Field(0, ge=0)
    """Connections of one user name to one listener. Anonymous clients count under the empty name. 0: 90 % of
    `connections_max`."""
    connects_per_second_max: float = Field(0.0, ge=0)
    """New connections per second of one address to one listener; the same number may arrive at once. 0: no
    limit."""
    descriptors_reserved: int = Field(128, ge=16)
    """File descriptors that listeners leave to HTTP, links and the store (at most 25 % of all): connections
    are refused before the process has none left."""
    connect_timeout_secs: float = Field(10.0, gt=0)
    """Time from accepting a connection until the client has authenticated. A silent connection holds a
    descriptor for no longer."""
    connect_bytes_max: int = Field(196_608, ge=256)
    """Size of one packet before authentication, so that unauthenticated clients cannot make the gateway
    reserve more. A CONNECT with a will and a password of 64 KiB each fits. One address may have
    `connections_per_address_max` such packets unfinished at once, each for `connect_timeout_secs`."""
    heartbeat_secs: int = Field(60, ge=0, le=65_535)
    """AMQP heartbeat that the gateway proposes; 0 disables heartbeats. A peer that vanishes holds its
    messages for twice this time."""
    keep_alive_secs_max: int = Field(65_535, ge=1, le=65_535)
    """Longest MQTT keep-alive that the gateway grants; a longer one, or none, is lowered to it (MQTT 5:
    Server Keep Alive)."""

    message_bytes_max: int = Field(16 * 1024 * 1024, ge=1, le=268_435_455)
    """Body of one message that is held in memory as a whole: all MQTT messages, all messages of links, and
    messages that cross a route. An MQTT packet carries 256 MiB at most. Larger messages are refused with
    0x95, or rejected."""
    amqp_message_bytes_max: int = Field(128 * 1024 * 1024, ge=1, le=0xFFFF_FFFF)
    """Body of one message of an AMQP 0-9-1 client; a larger one closes the channel with 406. A body over
    `message_bytes_max` is written to the folder `spool` of the store while it arrives, and stays there."""
    fast_message_bytes_max: int = Field(256 * 1024 * 1024, ge=1, le=0xFFFF_FFFF)
    """Body of one AMQP/Fast message. Routes to other endpoints accept `message_bytes_max` of it at most."""
    fast_memory_bytes_max: int = Field(16 * 1024 * 1024, ge=1024 * 1024, le=268_435_455)
    """Body of one AMQP/Fast message that arrives in fragments and is held in memory. A larger one is written
    to the folder `spool` of the store while it arrives, and stays there."""
    fast_memory_total_bytes_max: int = Field(64 * 1024 * 1024, ge=0)
    """Bodies of all AMQP/Fast messages that arrive in fragments at the same time and are held in memory;
    beyond it bodies over 1 MiB are written to disk, too."""
    spool_bytes_max: int = Field(8 * 1024**3, ge=1)
    """Bytes on disk of bodies that are not held in memory, with those that are arriving and those of
    interrupted transfers."""
    fast_partials_max: int = Field(1_000, ge=1)
    """Restartable AMQP/Fast transfers that were interrupted and may be resumed; beyond it the oldest are
    discarded."""
    fast_partial_bytes_max: int = Field(2 * 1024**3, ge=0)
    """Bytes of all interrupted AMQP/Fast transfers; beyond it the oldest are discarded."""
    fast_partial_age_secs: float = Field(24 * 3_600.0, gt=0)
    """Time that an interrupted AMQP/Fast transfer waits for its sender."""
    properties_max: int = Field(1_000, ge=1)
    """User properties of one MQTT packet, or entries of one message's header table, with nested ones. Beyond
    it: MQTT 0x97; AMQP 0-9-1 closes the channel with 406, for the table of a method the connection with 501;
    AMQP/Fast closes the handle with 542. A message of a link becomes a dead letter, or is rejected to its
    AMQP 0-9-1 broker."""
    properties_bytes_max: int = Field(131_072, ge=256)
    """Bytes of all properties of one MQTT packet or one message. Larger data belongs in the body."""
    filters_max: int = Field(1_000, ge=1)
    """Topic filters in one SUBSCRIBE or UNSUBSCRIBE, which are processed in one step. Beyond it: 0x97."""
    frame_bytes_max: int = Field(131_072, ge=4_096, le=16 * 1024 * 1024)
    """AMQP frame-max that the gateway proposes. Larger frames delay the heartbeats of their connection."""
    output_bytes_max: int = Field(32 * 1024 * 1024, ge=65_536)
    """Bytes written for one connection that its socket has not accepted yet, which bounds the memory of a
    slow reader. From half of it on (with at least two messages) the gateway stops reading from that
    connection."""
    receive_bytes_per_sec_max: int = Field(0, ge=0)
    """Bytes per second that the gateway reads from one connection; a faster client is not read for a while.
    One second's bytes may arrive at once. 0: no limit."""
    receive_messages_per_sec_max: int = Field(0, ge=0)
    """Messages per second that the client of one connection may publish; a faster client is not read for a
    while. 0: no limit."""
    topic_levels_max: int = Field(200, ge=1)
    """Levels of one MQTT topic or filter; each level is a step of matching. Beyond it a message is refused
    (MQTT 5: 0x90; 3.x: it is acknowledged and becomes a dead letter), a filter is refused (0x8F, 0x80), and a
    client with such a will cannot connect."""
    topic_filter_bytes_max: int = Field(4_096, ge=1, le=65_535)
    """Bytes of one MQTT topic filter, which is stored as long as its session. Beyond it: 0x8F; MQTT 3.1.1:
    0x80."""
    client_id_bytes_max: int = Field(1_024, ge=23, le=65_535)
    """Bytes of an MQTT client identifier, which names the stored session. Beyond it: 0x85; MQTT 3.x: 2. The
    name of an AMQP 0-9-1 connection is shortened to as many characters."""
    arguments_max: int = Field(64, ge=16)
    """Arguments of one AMQP queue, exchange or binding, with nested ones. They are stored, and a headers
    exchange compares them with each message. Beyond it: 406 on the channel."""
    matching_steps_per_user_max: int = Field(250_000, ge=1_000)
    """Steps (of some 30 ns) that the bindings of one user in one virtual host, or its MQTT subscriptions, may
    add to the matching of one message in the worst case. Steps come from headers bindings that share each
    argument with many others, patterns with several wildcards, members of shared subscriptions (12 each),
    exchanges bound to others (15 each) and queues of `x-consistent-hash` exchanges (20 each).
    Beyond it: 506 (AMQP), 0x97 (MQTT)."""
    definitions_bytes_max: int = Field(0, ge=0)
    """Bytes of the names and arguments of all queues, exchanges, bindings, subscriptions and sessions that
    clients create, and of MQTT clients' wills. Beyond it: 506 (AMQP, AMQP/Fast), 0x97 (MQTT). 0: 25 % of
    `memory_bytes_max`. Open AMQP channels, and AMQP/Fast channels and handles, may have as much again: they
    count 1 200 bytes each, and 256 for each message that a QUERY has listed on an open handle; so may
    unusually many or long client properties of AMQP connections."""
    definitions_per_user_share: float = Field(0.5, gt=0, le=1)
    """Fraction of `definitions_bytes_max` that the definitions of one user name may occupy, and its open
    channels and handles. Anonymous clients count under the empty name."""
    user_share: float = Field(0.9, gt=0, le=1)
    """Fraction that one user may have of retained messages, bodies on disk, dead letters, each outbox in
    the store, what waits for each link and paused route, the messages that one exchange delays, those of
    a virtual host that wait to be dead-lettered, event streams, and lines of the audit log in a second,
    in number and in bytes. It applies when there may be more than one user: two users, or a back end
    other than `users`. Beyond it: 0x97 (MQTT 5), 406 (AMQP 0-9-1), 506 (AMQP/Fast), 429 (HTTP); to an
    exchange that delays, what a full queue answers. Where new entries replace old ones (dead letters that
    no source can keep, transfers), those of a user with more than an equal part go first."""
    hops_max: int = Field(8, ge=1, le=255)
    """Routes that one message may cross, so that two gateways that feed each other stop."""

    inflight_max: int = Field(1_000, ge=1, le=65_535)
    """Unacknowledged messages per MQTT connection and direction (Receive Maximum). Each is held in memory as
    a whole."""
    topic_alias_max: int = Field(64, ge=0, le=65_535)
    """MQTT 5 topic aliases per connection and direction. Each stores a topic; beyond 65 536 bytes of the
    topics of a client's aliases: 0x97."""
    channels_max: int = Field(2_047, ge=1, le=65_535)
    """AMQP channels per connection. Each stores its unacknowledged deliveries and unconfirmed publishes."""
    handles_max: int = Field(8_192, ge=1, le=65_535)
    """AMQP/Fast handles per connection. Each stores its consumers and the routing of its names."""
    transaction_messages_max: int = Field(100_000, ge=1)
    """Messages that an AMQP or AMQP/Fast channel may publish before it commits; they wait in memory."""
    transaction_bytes_max: int = Field(64 * 1024 * 1024, ge=1)
    """Bytes of the messages of one uncommitted transaction, without bodies on disk."""
    prefetch_max: int = Field(10_000, ge=1, le=65_535)
    """Unacknowledged deliveries to one AMQP consumer, also to a consumer without a limit of its own, and to
    one channel that fetches with `basic.get`."""
    unacknowledged_bytes_max: int = Field(128 * 1024 * 1024, ge=1)
    """Bytes of unacknowledged deliveries of one AMQP or AMQP/Fast connection; beyond it the connection
    receives nothing more until it acknowledges."""
    consumers_max: int = Field(1_000, ge=1)
    """AMQP consumers per connection."""

    sessions_max: int = Field(50_000, ge=1)
    """MQTT sessions, connected or not, and durable subscriptions of one AMQP/Fast virtual host. The limit
    exists because a client can invent any number of client identifiers."""
    sessions_per_address_max: int = Field(0, ge=0)
    """MQTT sessions that were opened from one address (of IPv6: one /64). 0: 90 % of `sessions_max`."""
    sessions_per_user_max: int = Field(0, ge=0)
    """MQTT sessions of one user name, and durable AMQP/Fast subscriptions of one user name. 0: 90 % of
    `sessions_max`."""
    sessions_policy: Literal["expire_soonest", "refuse"] = "expire_soonest"
    """MQTT: policy when a limit of sessions is reached. `expire_soonest` ends the disconnected session that
    would expire first, among those of the user or address with most sessions; `refuse` refuses the new
    client."""
    ended_sessions_bytes_max: int = Field(8 * 1024**3, ge=1)
    """Bytes on disk of what ended MQTT sessions owe to other members of their shared subscriptions, while
    these are full. Beyond it, or with more than `sessions_max` such sessions, what the oldest session of a
    user with more than an equal part owes is dropped."""
    session_full: Literal["hold", "drop"] = "hold"
    """MQTT: policy when the session of a connected client is full. `hold` stops reading from its publishers;
    `drop` drops the newest messages for that client and counts them."""
    stall_secs: float = Field(30.0, gt=0)
    """MQTT: time that publishers are held for a full session whose client accepts nothing. Then the client is
    disconnected (0x97, counted as `quota_exceeded`), and its session holds no publisher again before the
    client has consumed half of it."""
    session_delay_secs: float = Field(0.015, ge=0, le=1)
    """MQTT, with `session_full: hold`: publishers are held when a connected client needs longer than this for
    its queued messages at its present rate, so that a client a little slower than its publishers stays only
    this far behind. A backlog of more than one second holds no publisher before the session is full. 0:
    publishers are held only when the session is full."""
    session_expiry_secs_max: int = Field(7 * 24 * 3_600, ge=0)
    """Longest time that the session of a disconnected MQTT client is stored."""
    subscriptions_max: int = Field(1_000, ge=1)
    """Subscriptions of one MQTT session."""
    subscriptions_total_max: int = Field(1_000_000, ge=1)
    """Subscriptions of all MQTT sessions. Each is a node of the topic tree."""
    subscriptions_per_user_max: int = Field(0, ge=0)
    """Subscriptions of all MQTT sessions of one user name. 0: 90 % of `subscriptions_total_max`."""
    retained_messages_max: int = Field(100_000, ge=0)
    """MQTT topics with a retained message. Retained messages stay until they expire or are cleared; beyond
    the limit new ones are refused (MQTT 5: 0x97)."""
    retained_bytes_max: int = Field(256 * 1024 * 1024, ge=0)
    """Bytes of all retained messages, those of long or deep topics included. Beyond it new ones are refused,
    and the topic keeps its present message."""

    queues_max: int = Field(10_000, ge=1)
    """AMQP queues of the embedded broker, and AMQP/Fast queues of one virtual host."""
    queues_per_user_max: int = Field(0, ge=0)
    """AMQP queues, and AMQP/Fast queues and topics, that one user has created in one virtual host, together
    with AMQP/Fast queues that exist because of a route. 0: 90 % of `queues_max` or `topics_max`."""
    topics_max: int = Field(10_000, ge=1)
    """AMQP/Fast topics of one virtual host. Each name that a client uses is stored."""
    exchanges_max: int = Field(1_000, ge=1)
    """AMQP exchanges of the embedded broker."""
    bindings_max: int = Field(100_000, ge=1)
    """AMQP bindings of the embedded broker. Each takes part in matching."""
    exchanges_per_user_max: int = Field(0, ge=0)
    """AMQP exchanges that one user name has created in one virtual host. 0: 90 % of `exchanges_max`."""
    bindings_per_user_max: int = Field(0, ge=0)
    """AMQP bindings that one user has created in one virtual host, of any queue or exchange. 0: 90 % of
    `bindings_max`."""
    queue_messages_max: int = Field(1_000_000, ge=1)
    """Messages in one queue or one session; beyond it publishers are refused or wait."""
    queue_bytes_max: int = Field(512 * 1024 * 1024, ge=1)
    """Bytes in one queue or one session; beyond it publishers are refused or wait."""
    queue_memory_messages_max: int = Field(100_000, ge=1)
    """Messages of one durable queue or session that are held in memory; further messages are on disk only."""
    queue_memory_bytes_max: int = Field(64 * 1024 * 1024, ge=1)
    """Bytes of one durable queue or session that are held in memory; further messages are on disk only."""
    store_pending_bytes_max: int = Field(64 * 1024 * 1024, ge=65_536)
    """Bytes that wait to be written to disk; beyond it the gateway stops reading from publishers until the
    disk has caught up."""
    dead_letters_max: int = Field(10_000, ge=0)
    """Stored dead letters; beyond it messages stay with their sources."""
    dead_letters_bytes_max: int = Field(64 * 1024 * 1024, ge=0)
    """Bytes of all stored dead letters; beyond it messages stay with their sources."""
    cache_entries_max: int = Field(100_000, ge=16)
    """Addresses whose routes a listener or a link caches, of some 700 bytes each; beyond it the oldest are
    evicted."""

    def overridden_by(self, other: Limits | None) -> Limits:
        """Return a copy of these limits, overridden by the limits that `other` sets explicitly.

        If `other` is None, return these limits.
        """
        if other is None:
            return self
        return self.model_copy(update={name: getattr(other, name) for name in other.model_fields_set})
