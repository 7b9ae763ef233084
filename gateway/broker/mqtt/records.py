"""Small records of MQTT in the store, which survive a restart.

| kind | key | value |
|---|---|---|
| session | client id | JSON, the fields of SessionRecord |
| subscription | client id, U+0000, filter | JSON, the fields of SubscriptionOptions |
| owed | client id, U+0000, filter | empty: the session still lacks some of its retained messages |
| released | client id, U+0000, packet id in 2 bytes | position of its message in 8 bytes |
| renumbered | client id, U+0000, position in 8 bytes | packet id in 2 bytes, if another than usual |
| will | client id | JSON, see `put_will` |
| will | client id, U+0000, any text | JSON, of a will that is being published and not settled yet |

No client id contains U+0000 (5: 1.5.4.2), so the records of a client are found by its prefix; keys are UTF-8.
Messages are in two logs of the client's name: `session`, what it is owed, and `incoming`, the packet ids of
QoS 2 that it has used. Retained messages are in retained.py.
"""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections.abc import Iterator
from dataclasses import asdict
from typing import Final, NamedTuple

from gateway.access.principal import Principal
from gateway.broker.mqtt.session import SubscriptionOptions
from gateway.broker.shares import text_bytes
from gateway.model.message import Sender
from gateway.protocols.mqtt.packets import Will
from gateway.protocols.mqtt.properties import decode_list, encode_list
from gateway.protocols.mqtt.spec import WILL as WILL_LIST
from gateway.store.recovery import contain_failure
from gateway.store.store import Store

SESSION: Final = "session"
SUBSCRIPTION: Final = "subscription"
OWED: Final = "owed"
RELEASED: Final = "released"
RENUMBERED: Final = "renumbered"
WILL: Final = "will"
INCOMING: Final = "incoming"
WILL_BYTES: Final = 512  # bytes of a will, in addition to its texts
END: Final = b"\0"  # of the client id in a key


class SessionRecord(NamedTuple):
    """Record of a session that outlives its connection.

    `utc` is when its client last connected or disconnected, in POSIX seconds, and `attached` is True if it
    connected. Messages at positions below `sent` may have been sent. The record is not updated while the
    client is connected: if it was connected before a restart, every stored message may have been sent. `user`
    and `place` (address) are those that last opened the session.
    """

    expiry_secs: float
    utc: float
    attached: bool
    sent: int
    user: str
    place: str


class Records:
    """Records of one MQTT namespace in the store.

    `changes` counts changes that must be on disk before clients may be informed of them.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self.changes = 0
        self._wills: set[str] = set()

    @property
    def failure(self) -> str:
        """Reason why nothing can be recorded now; "" if records can be written."""
        return self.store.failure

    # Sessions.

    def put_session(self, client: str, record: SessionRecord) -> None:
        """Store the state of a session."""
        fields = record._asdict() | {"utc": self.store.timeline.stored(record.utc)}
        self._put(SESSION, client.encode(), json.dumps(fields).encode())

    def forget_session(self, client: str) -> None:
        """Delete the records of a session. Its logs of messages are deleted elsewhere."""
        self.changes += 1
        self.store.delete(SESSION, client.encode())
        self.store.delete_all(SUBSCRIPTION, client.encode() + END)
        self.store.delete_all(OWED, client.encode() + END)
        self.store.delete_all(RELEASED, client.encode() + END)
        self.store.delete_all(RENUMBERED, client.encode() + END)

    def sessions(self) -> Iterator[tuple[str, SessionRecord]]:
        """Yield client id and record of each session.

        Like all iterators of this class it is only valid before the store starts.
        """
        for key, value in self._records_of(SESSION):
            with contain_failure(SESSION, key):
                record = SessionRecord(**json.loads(value))
                yield key.decode(), record._replace(utc=self.store.timeline.restored(record.utc))

    # Subscriptions.

    def put_subscription(self, client: str, topic_filter: str, options: SubscriptionOptions) -> None:
        """Store a subscription of the session with the client id `client`."""
        self._put(SUBSCRIPTION, _key(client, topic_filter.encode()), json.dumps(asdict(options)).encode())

    def delete_subscription(self, client: str, topic_filter: str) -> None:
        """Delete the record of a subscription."""
        self._delete(SUBSCRIPTION, _key(client, topic_filter.encode()))

    def subscriptions(self) -> Iterator[tuple[str, str, SubscriptionOptions]]:
        """Yield client id, topic filter and options of each subscription."""
        for key, value in self._records_of(SUBSCRIPTION):
            client, _, topic_filter = key.partition(END)
            with contain_failure(SUBSCRIPTION, key):
                yield client.decode(), topic_filter.decode(), SubscriptionOptions(**json.loads(value))

    def put_owed(self, client: str, topic_filter: str) -> None:
        """Record that some retained messages are still to be sent for a subscription."""
        self._put(OWED, _key(client, topic_filter.encode()), b"")

    def delete_owed(self, client: str, topic_filter: str) -> None:
        """Delete the record that some retained messages are still to be sent for a subscription."""
        self.store.delete(OWED, _key(client, topic_filter.encode()))

    def retained_due(self) -> Iterator[tuple[str, str]]:
        """Yield client id and topic filter of subscriptions whose retained messages are not all sent."""
        for key, _ in self._records_of(OWED):
            client, _, topic_filter = key.partition(END)
            with contain_failure(OWED, key):
                yield client.decode(), topic_filter.decode()

    # Outgoing QoS 2, after PUBREC and before PUBCOMP.

    def put_released(self, client: str, packet_id: int, position: int) -> None:
        """Record that the client has received (PUBREC) the message sent with `packet_id`."""
        self.store.put(RELEASED, _key(client, packet_id.to_bytes(2, "big")), position.to_bytes(8, "big"))

    def delete_released(self, client: str, packet_id: int) -> None:
        """Delete the record of a packet id, because PUBCOMP has arrived."""
        self.store.delete(RELEASED, _key(client, packet_id.to_bytes(2, "big")))

    def released_ids(self) -> Iterator[tuple[str, int, int]]:
        """Yield client id, packet id and position of messages that have PUBREC but not PUBCOMP."""
        for key, value in self._records_of(RELEASED):
            client, _, packet_id = key.partition(END)
            with contain_failure(RELEASED, key):
                yield client.decode(), int.from_bytes(packet_id, "big"), int.from_bytes(value, "big")

    # Outgoing messages whose usual packet id was in use.

    def put_renumbered(self, client: str, position: int, packet_id: int) -> None:
        """Record the packet id of the message at `position` in the session's log; it is not the usual one."""
        self.store.put(RENUMBERED, _key(client, position.to_bytes(8, "big")), packet_id.to_bytes(2, "big"))

    def delete_renumbered(self, client: str, position: int) -> None:
        """Delete the record of a message's packet id, because the message is settled."""
        self.store.delete(RENUMBERED, _key(client, position.to_bytes(8, "big")))

    def renumbered(self) -> Iterator[tuple[str, int, int]]:
        """Yield client id, position and packet id of messages that do not have their usual packet id.

        The usual packet id follows from the message's position in the session's log.
        """
        for key, value in self._records_of(RENUMBERED):
            client, _, position = key.partition(END)
            with contain_failure(RENUMBERED, key):
                yield client.decode(), int.from_bytes(position, "big"), int.from_bytes(value, "big")

    # Wills.

    def put_will(
        self, key: str, will: Will, sender: Sender, principal: Principal, *, if_refused: bool = False
    ) -> None:
        """Store the will of a client, or one that is being published.

        With `if_refused` it is stored only if the store refuses the messages of this pass of the event loop.
        The value is a JSON object with the fields of Will, Sender and Principal; the body and the property
        list (as MQTT 5 encodes it) are base64.
        """
        record = {
            "topic": will.topic,
            "body": b64encode(will.body).decode(),
            "qos": will.qos,
            "retain": will.retain,
            "properties": b64encode(encode_list(will.properties, WILL_LIST)).decode(),
            "sender": sender.to_dict(),
            "principal": principal.to_dict(),
        }
        self._wills.add(key)
        self.changes += 1
        put = self.store.put_if_refused if if_refused else self.store.put
        put(WILL, key.encode(), json.dumps(record).encode())

    def delete_will(self, key: str) -> None:
        """Delete the record of a will that was published or will not be."""
        if key in self._wills:
            self._wills.remove(key)
            self._delete(WILL, key.encode())

    def wills(self) -> Iterator[tuple[str, Will, Sender, Principal]]:
        """Yield key, will, sender and principal of the wills that an earlier process has not published.

        Their clients were connected when the gateway ended, or the wills were delayed or being published.
        """
        for key, value in self._records_of(WILL):
            with contain_failure(WILL, key):
                self._wills.add(key.decode())
                record = json.loads(value)
                properties = decode_list(b64decode(record["properties"]), WILL_LIST)
                will = Will(
                    record["topic"], b64decode(record["body"]), record["qos"], record["retain"], properties
                )
                sender = Sender(**record["sender"])
                yield key.decode(), will, sender, Principal.from_dict(sender.user, record.get("principal"))

    # For all records.

    def _put(self, kind: str, key: bytes, value: bytes) -> None:
        self.changes += 1
        self.store.put(kind, key, value)

    def _delete(self, kind: str, key: bytes) -> None:
        self.changes += 1
        self.store.delete(kind, key)

    def _records_of(self, kind: str) -> Iterator[tuple[bytes, bytes]]:
        for key, value in self.store.records(kind):
            assert isinstance(key, bytes)
            assert isinstance(value, bytes)
            yield key, value


def _key(client: str, rest: bytes) -> bytes:
    return client.encode() + END + rest


def will_bytes(will: Will) -> int:
    """Return the size in bytes that a client's will occupies in memory and in the store."""
    properties = encode_list(will.properties, WILL_LIST)
    return WILL_BYTES + text_bytes(will.topic) + 2 * (len(will.body) + len(properties))
