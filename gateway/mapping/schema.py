"""A mapping file as its author writes it: names, types, defaults, and which words belong together.

Whether a word fits the protocol of its endpoint is not known here; the router and the linter check it.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

from gateway.mapping.names import Escape

Service = Literal["queue", "topic", "peer"]
Mode = Literal["transient", "persistent"]
Qos = Annotated[int, Field(ge=0, le=2)]
HeaderValue = str | int | float | bool

# A route's name is a metric label: short, and of characters that need no quoting anywhere.
RouteName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", max_length=64)]
WINDOW = r"^[1-9][0-9]{0,6}[smhd]$"
SECONDS_OF = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}
PROTOCOL_OF_WORD = {
    "topic": "mqtt",
    "exchange": "amqp091",
    "routing_key": "amqp091",
    "binding_key": "amqp091",
    "queue": "amqp091",
    "mandatory": "amqp091",
    "destination": "amqpfast",
    "service": "amqpfast",
}


class Strict(BaseModel):
    """Nothing is converted, nothing unknown is let through, nothing changes."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")


class Words(Strict):
    """An endpoint and an address in its protocol's words."""

    endpoint: str = Field(description="A listener or link, by its name in the configuration.")

    def given(self) -> tuple[str, ...]:
        """The words of an address that the author wrote."""
        return tuple(word for word in PROTOCOL_OF_WORD if getattr(self, word, None) is not None)

    @property
    def protocol(self) -> str:
        """The protocol that the words belong to."""
        return PROTOCOL_OF_WORD[self.given()[0]]

    @model_validator(mode="after")
    def _one_protocol(self) -> Words:
        given = self.given()
        if not given:
            raise ValueError("no address: give topic, exchange, queue or destination")
        if len({PROTOCOL_OF_WORD[word] for word in given}) > 1:
            raise ValueError(f"words of different protocols: {', '.join(given)}")
        if "service" in given and "destination" not in given:
            raise ValueError("service needs destination")
        if "queue" in given and not {"exchange", "routing_key", "binding_key"}.isdisjoint(given):
            raise ValueError("queue stands without exchange and key")
        if self.protocol == "amqp091" and "queue" not in given and "exchange" not in given:
            raise ValueError("give exchange or queue")
        return self


class From(Words):
    """Where a route takes messages from."""

    topic: str | None = Field(
        None, description="MQTT topic filter with captures.", examples=["plant/{line}/#"]
    )
    exchange: str | None = Field(None, description='AMQP 0-9-1 exchange; "" is the default exchange.')
    binding_key: str | None = Field(
        None, description="AMQP 0-9-1 binding key with captures; default: every key."
    )
    queue: str | None = Field(None, description="AMQP 0-9-1 queue, by its exact name.", min_length=1)
    service: Service | None = Field(None, description="AMQP/Fast service type; default: topic.")
    destination: str | None = Field(None, description="AMQP/Fast destination with captures.", min_length=1)


class To(Words):
    """Where a route puts messages, and how."""

    topic: str | None = Field(None, description="Template of an MQTT topic.", min_length=1)
    qos: Qos | None = Field(None, description="QoS of the message in the target; default: kept.")
    retain: bool | None = Field(None, description="Retain flag of the message in the target; default: kept.")
    exchange: str | None = Field(None, description="Template of an AMQP 0-9-1 exchange.")
    routing_key: str | None = Field(None, description='Template of a routing key; default: "".')
    queue: str | None = Field(None, description="Template of an AMQP 0-9-1 queue.", min_length=1)
    mandatory: bool | None = Field(
        None, description="Whether an unroutable message is refused; default: true."
    )
    service: Service | None = Field(None, description="AMQP/Fast service type; default: topic.")
    destination: str | None = Field(None, description="Template of an AMQP/Fast destination.", min_length=1)

    @model_validator(mode="after")
    def _topic_words(self) -> To:
        if self.topic is None and (self.qos is not None or self.retain is not None):
            raise ValueError("qos and retain belong to topic; for other targets see delivery")
        return self


class Delivery(Strict):
    """Which guarantee a message has in the target; what is not given is kept."""

    qos0: Mode | None = None
    qos1: Mode | None = None
    qos2: Mode | None = None
    transient: Qos | None = None
    persistent: Qos | None = None


class OutboxRule(Strict):
    """How much may wait in a route's outbox; what is not given is as the link's options say."""

    messages_max: Annotated[int, Field(ge=1)] | None = Field(None, description="Messages that wait.")
    bytes_max: Annotated[int, Field(ge=1)] | None = Field(None, description="Octets of their bodies.")
    age_secs_max: Annotated[float, Field(gt=0, strict=False)] | None = Field(
        None, description="Seconds that a message may wait; default: for ever."
    )
    policy: Literal["reject", "drop_oldest", "dead_letter"] | None = Field(
        None,
        description="At a limit: refuse new messages, drop the oldest, or make them dead letters.",
    )


class Deduplicate(Strict):
    """Which messages a route takes for repeats of one that it has accepted."""

    by: Literal["message_id"] = "message_id"
    window: Annotated[str, StringConstraints(pattern=WINDOW)] = Field(
        description="How long an id is remembered: a number and s, m, h or d.", examples=["10m"]
    )
    ids_max: int = Field(1_000_000, ge=1, description="Ids remembered; beyond it the oldest are forgotten.")

    @property
    def window_secs(self) -> float:
        """The window in seconds."""
        return float(int(self.window[:-1]) * SECONDS_OF[self.window[-1]])


class RouteRule(Strict):
    """One rule: from an endpoint's pattern to an endpoint's address template."""

    name: RouteName
    source: From = Field(alias="from")
    to: To
    delivery: Delivery = Delivery()
    headers: dict[str, HeaderValue] = Field({}, description="Headers to set; strings are templates.")
    when: str | None = Field(None, description="CEL expression; only messages for which it is true cross.")
    settle: Literal["confirmed", "stored"] = "confirmed"
    outbox: OutboxRule | None = Field(None, description="Limits of the outbox; with settle: stored.")
    attempts_max: int = Field(
        5,
        ge=1,
        le=1_000,
        description="Attempts until a message that the target refuses is a dead letter; with settle: stored.",
    )
    message_id: Literal["keep", "add"] = Field(
        "keep", description="Give messages without a message id one, which stays when they are sent again."
    )
    deduplicate: Deduplicate | None = Field(None, description="Accept repeats without passing them on.")
    journal: bool = Field(False, description="Write it down even when the journal does not note all.")
    escape: Escape = "percent"
    on_reject: Literal["dead_letter", "retry"] = "retry"
    optional: bool = Field(
        False, description="Leave the route out when one of its endpoints is not configured."
    )

    @model_validator(mode="after")
    def _one_qos(self) -> RouteRule:
        if self.to.qos is not None and (
            self.delivery.transient is not None or self.delivery.persistent is not None
        ):
            raise ValueError("to.qos and delivery.transient/persistent both say the QoS; give one of them")
        return self

    @model_validator(mode="after")
    def _outbox_words(self) -> RouteRule:
        said = [word for word in ("outbox", "attempts_max") if word in self.model_fields_set]
        if said and self.settle != "stored":
            raise ValueError(f"{said[0]} is for settle: stored; without it there is no outbox")
        return self


class Addressed(Strict):
    """Where a message of a test is, in the words of its endpoint's protocol."""

    endpoint: str
    topic: str | None = None
    exchange: str | None = None
    routing_key: str | None = None
    queue: str | None = None
    service: Service | None = None
    destination: str | None = None


class Published(Addressed):
    """The message that a test publishes."""

    body: str = ""
    qos: Qos | None = None
    delivery_mode: Annotated[int, Field(ge=1, le=2)] | None = None
    persistent: bool | None = None
    retain: bool = False
    headers: dict[str, HeaderValue] = {}
    content_type: str | None = None
    reply_to: str | None = None
    client_id: str = ""
    user: str = ""
    hops: int = Field(0, ge=0)


class Expected(Addressed):
    """What must arrive. Only what is given is compared; of the headers, only the names that are given."""

    body: str | None = None
    qos: Qos | None = None
    delivery_mode: Annotated[int, Field(ge=1, le=2)] | None = None
    persistent: bool | None = None
    retain: bool | None = None
    headers: dict[str, HeaderValue] = {}
    content_type: str | None = None
    reply_to: str | None = None


class Case(Strict):
    """A test: what is published, what must arrive in the order of the routes, and why the rest is refused."""

    name: str
    publish: Published
    expect: list[Expected] = []
    refused: list[Literal["name_invalid", "hops", "malformed"]] = []


class MappingFile(Strict):
    """A whole mapping file."""

    version: Literal[1]
    routes: list[RouteRule] = Field(min_length=1)
    tests: list[Case] = []


def json_schema() -> dict[str, Any]:
    """The JSON Schema (2020-12) of a mapping file, for editors."""
    schema = MappingFile.model_json_schema(by_alias=True)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}
