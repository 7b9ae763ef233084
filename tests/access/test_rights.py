"""Roles, rules and decisions: who may do what, and by which rule."""

from __future__ import annotations

from itertools import product
from typing import Any, Final

import pytest
from pydantic import ValidationError

from gateway.access.authorization import Authorization, Roles
from gateway.access.filters import FilterSet, covers, overlaps
from gateway.access.principal import Principal
from gateway.access.rights import Rights
from gateway.access.scopes import parse_scope
from gateway.broker.topics import Trie
from gateway.settings import Settings
from gateway.settings.access import DefaultRoles, Role

LEVELS: Final = ("a", "b", "", "$a", "+", "#")
TOPICS: Final = [
    "/".join(one) for count in (1, 2, 3) for one in product(("a", "b", "", "$a"), repeat=count) if any(one)
]
FILTERS: Final = [
    "/".join(one) for count in (1, 2, 3) for one in product(LEVELS, repeat=count) if "#" not in one[:-1]
]


def matched(topic_filter: str) -> set[str]:
    """The topics of a small world that a filter matches, as the broker has it."""
    trie: Trie[str] = Trie("+", "#")
    trie.add(topic_filter.split("/"), "x")
    return {one for one in TOPICS if any(trie.match(one.split("/"), hidden=one[:1] == "$"))}


MATCHED: Final = {one: matched(one) for one in FILTERS}


def test_a_filter_covers_what_matches_no_more_than_it_does() -> None:
    for allowed, wanted in product(FILTERS, repeat=2):
        if covers(allowed.split("/"), wanted.split("/")):
            assert MATCHED[wanted] <= MATCHED[allowed], (allowed, wanted)
    for allowed, topic in product(FILTERS, TOPICS):
        assert covers(allowed.split("/"), topic.split("/")) == (topic in MATCHED[allowed]), (allowed, topic)


def test_filters_meet_when_a_topic_matches_both() -> None:
    for denied, wanted in product(FILTERS, repeat=2):
        met = overlaps(denied.split("/"), wanted.split("/"))
        if MATCHED[denied] & MATCHED[wanted]:
            assert met, (denied, wanted)
        rules = FilterSet([(denied, "rule")])
        assert (rules.overlapping_rule(wanted) is not None) == met, (denied, wanted)
        found = rules.covering_rule(wanted)
        assert (found is not None) == covers(denied.split("/"), wanted.split("/")), (denied, wanted)


def rights(
    *roles: dict[str, Any],
    user: str = "ann",
    client_id: str = "ann-1",
    fields: dict[str, str] | None = None,
    scopes: tuple[str, ...] = (),
) -> Rights:
    """Of a user with these roles, r0, r1 and so on."""
    given = {f"r{at}": Role.model_validate(role) for at, role in enumerate(roles)}
    authorization = Authorization(Roles(given, {user: tuple(given)}))
    principal = Principal(user, fields=fields or {}, scopes=scopes)
    return authorization.rights_of(principal, client_id)


@pytest.mark.parametrize(
    "rules, action, name, allowed",
    [
        ({"publish": "plant/{user}/#"}, "publish", "plant/ann/x", True),
        ({"publish": "plant/{user}/#"}, "publish", "plant/ann", True),
        ({"publish": "plant/{user}/#"}, "publish", "plant/bob/x", False),
        ({"publish": "plant/{user}/#"}, "publish", "plant/annx", False),
        ({"publish": "dev/{client_id}"}, "publish", "dev/ann-1", True),
        ({"publish": "dev/{cn}"}, "publish", "dev/machine.7", True),
        ({"publish": "dev/{serial}"}, "publish", "dev/", False),
        ({"publish": "dev/{serial}"}, "publish", "dev/{serial}", False),
        ({"publish": "#"}, "publish", "$SYS/broker/connection/b/state", False),
        ({"publish": "$SYS/#"}, "publish", "$SYS/broker/connection/b/state", True),
        ({"publish": "#", "deny_publish": "a/+/secret"}, "publish", "a/b/secret", False),
        ({"publish": "#", "deny_publish": "a/+/secret"}, "publish", "a/b/c", True),
        ({"publish": "a"}, "subscribe", "a", False),
        ({"subscribe": "a"}, "publish", "a", False),
        ({"subscribe": "a/+"}, "subscribe", "a/#", False),
        ({"subscribe": "a/#"}, "subscribe", "a/+/b", True),
        ({"subscribe": "#"}, "subscribe", "#", True),
        ({"subscribe": "#"}, "subscribe", "$SYS/#", False),
        ({"subscribe": "$SYS/broker/uptime"}, "subscribe", "$SYS/broker/uptime", True),
        ({"subscribe": "#", "deny_subscribe": "secret/#"}, "subscribe", "#", False),
        ({"subscribe": "#", "deny_subscribe": "secret/#"}, "subscribe", "+/x", False),
        ({"subscribe": "#", "deny_subscribe": "secret/#"}, "subscribe", "open/+", True),
        ({"subscribe": "a/#"}, "subscribe", "$share/g/a/b", True),
        ({"subscribe": "a/#"}, "subscribe", "$share/g/b", False),
        ({"subscribe": "#", "shared": False}, "subscribe", "$share/g/a", False),
        ({}, "publish", "a", False),
    ],
)
def test_rules_of_topics(rules: dict[str, Any], action: str, name: str, allowed: bool) -> None:
    mine = rights({"mqtt": rules}, fields={"cn": "machine.7"})
    decide = mine.mqtt_publish if action == "publish" else mine.mqtt_subscribe
    assert decide(name).allowed is allowed


@pytest.mark.parametrize("name", ["#", "+", "a/b", "", "\0"])
def test_a_name_that_is_no_level_gains_nothing(name: str) -> None:
    mine = rights({"mqtt": {"publish": "plant/{user}", "subscribe": "plant/{user}/x"}}, user=name)
    for topic in ("plant/a", "plant/a/b", "plant/", "plant/x/x"):
        assert not mine.mqtt_publish(topic).allowed
    for topic_filter in ("plant/#", "plant/+", "plant/+/x", "plant/a/b/x"):
        assert not mine.mqtt_subscribe(topic_filter).allowed


def test_nobody_reads_the_brokers_figures_by_being_called_so() -> None:
    assert not rights({"mqtt": {"subscribe": "{user}/#"}}, user="$SYS").mqtt_subscribe("$SYS/#").allowed


def test_what_roles_allow_is_joined_and_what_one_denies_is_denied() -> None:
    mine = rights(
        {"mqtt": {"publish": "a/#", "qos_max": 0, "retain": False, "will": False}},
        {"mqtt": {"publish": "b/#", "deny_publish": "a/x", "qos_max": 1, "session_expiry_secs_max": 60}},
        {"amqp091": {"/": {"read": ".*"}}},
    )
    assert [mine.mqtt_publish(one).allowed for one in ("a/y", "b", "a/x", "c")] == [True, True, False, False]
    assert mine.mqtt_publish("a/y").rule == "roles.r0.mqtt.publish: a/#"
    assert mine.mqtt_publish("a/x").rule == "roles.r1.mqtt.deny_publish: a/x"
    assert (mine.mqtt.qos_max, mine.mqtt.retain, mine.mqtt.will) == (1, True, True)
    assert mine.mqtt.session_expiry_secs_max is None  # the first says nothing of it


PERMISSIONS: Final = {
    "/": {
        "configure": "^{user}-",
        "write": "^amq\\.topic$|^amq\\.default$|^{user}-",
        "read": "^{user}-|^amq\\.topic$",
        "topics": {"amq.topic": {"write": "^{username}\\.", "read": "^{vhost}|^open\\."}},
    },
    "tenant-{user}": {"configure": ".*", "write": ".*", "read": ".*"},
    "empty": {},
}


@pytest.mark.parametrize(
    "host, permission, name, key, allowed",
    [
        ("/", "configure", "ann-q", None, True),
        ("/", "configure", "bob-q", None, False),
        ("/", "configure", "amq.gen-xyz", None, False),
        ("/", "write", "amq.default", None, True),
        ("/", "write", "amq.topic", "ann.x", True),
        ("/", "write", "amq.topic", "annex", False),
        ("/", "write", "amq.fanout", None, False),
        ("/", "read", "amq.topic", "/x", True),
        ("/", "read", "amq.topic", "open.x", True),
        ("/", "read", "amq.topic", "ann.x", False),
        ("tenant-ann", "configure", "anything", None, True),
        ("tenant-bob", "configure", "anything", None, False),
        ("empty", "read", "", None, False),
        ("empty", "read", "q", None, False),
    ],
)
def test_rules_of_permissions(host: str, permission: str, name: str, key: str | None, allowed: bool) -> None:
    mine = rights({"amqp091": PERMISSIONS})
    found = mine.amqp(host, permission, name)
    if key is not None and found.allowed:
        found = mine.amqp_key(host, permission, name, key)
    assert found.allowed is allowed


def test_a_name_is_no_expression() -> None:
    mine = rights({"amqp091": {"/": {"read": "^{user}$"}}}, user=".*")
    assert not mine.amqp("/", "read", "anything").allowed
    assert mine.amqp("/", "read", ".*").allowed


def test_a_virtual_host_is_entered_by_whoever_has_anything_there() -> None:
    mine = rights({"amqp091": PERMISSIONS, "amqpfast": {"*": {"peers": "echo"}}})
    assert [mine.enters_amqp(one).allowed for one in ("/", "empty", "other")] == [True, True, False]
    assert mine.enters_fast("whatever").allowed
    assert not rights({"mqtt": {}}).enters_fast("/").allowed


DESTINATIONS: Final = {
    "/": {
        "queues": {"write": ["orders.*", "in"], "read": "orders.{user}.*", "create": "orders.*"},
        "topics": {"browse": "news.*", "read": "news.today"},
        "peers": "echo",
    }
}


@pytest.mark.parametrize(
    "right, service, name, whole, allowed",
    [
        ("write", "queue", "orders.x", False, True),
        ("write", "queue", "in", False, True),
        ("write", "queue", "in", True, False),
        ("write", "queue", "int", False, False),
        ("write", "queue", "orders.", True, True),
        ("write", "queue", "order", True, False),
        ("write", "queue", "", True, False),
        ("write", "topic", "orders.x", False, False),
        ("read", "queue", "orders.ann.7", False, True),
        ("read", "queue", "orders.bob.7", False, False),
        ("browse", "queue", "orders.ann.7", False, True),
        ("browse", "topic", "news.old", False, True),
        ("browse", "topic", "news.today", False, True),
        ("read", "topic", "news.old", False, False),
        ("create", "queue", "orders.new", False, True),
        ("create", "topic", "orders.new", False, False),
        ("talk", "peer", "echo", False, True),
        ("talk", "peer", "tunnel", False, False),
    ],
)
def test_rules_of_destinations(right: str, service: str, name: str, whole: bool, allowed: bool) -> None:
    mine = rights({"amqpfast": DESTINATIONS})
    assert mine.fast("/", right, service, name, whole=whole).allowed is allowed
    assert not mine.fast("other", right, service, name, whole=whole).allowed


def test_identifiers_that_roles_bind() -> None:
    mine = rights({"client_id": "{user}-*"}, {"client_id": ["shared"]}, {"mqtt": {"publish": "#"}})
    allowed = [
        mine.has_client_id(one).allowed for one in ("ann-1", "ann-", "shared", "ann", "bob-1", "xann-1")
    ]
    assert allowed == [True, True, True, False, False, False]
    assert rights({"mqtt": {}}).has_client_id("any").allowed
    assert not rights({"client_id": "{client_id}"}).has_client_id("mine").allowed  # it says nothing


@pytest.mark.parametrize(
    "scope, permission, host, name, key, allowed",
    [
        ("read:*/*", "read", "/", "q", "k", True),
        ("read:*/*", "write", "/", "q", "k", False),
        ("read:%2F/q", "read", "/", "q", "k", True),
        ("read:%2F/q", "read", "other", "q", "k", False),
        ("read:*/q", "read", "/", "q2", "k", False),
        ("write:*/amq.topic/plant.*", "write", "/", "amq.topic", "plant.x", True),
        ("write:*/amq.topic/plant.*", "write", "/", "amq.topic", "office", False),
        ("write:*/amq%2Etopic/a*z", "write", "/", "amq.topic", "abcz", True),
        ("write:*/a.c", "write", "/", "abc", "k", False),
    ],
)
def test_scopes_of_tokens(scope: str, permission: str, host: str, name: str, key: str, allowed: bool) -> None:
    mine = rights({}, scopes=(scope, "openid", "tag:administrator"))
    assert mine.amqp_key(host, permission, name, key).allowed is allowed


@pytest.mark.parametrize("text", ["", "read", "read:x", "read:/x", "erase:*/*", "read:*/", "x.read:*/*"])
def test_what_is_no_scope_is_no_right(text: str) -> None:
    assert parse_scope(text) is None


def test_topics_are_keys_for_a_token_and_for_what_rabbitmq_allowed() -> None:
    token = rights({}, scopes=("write:*/amq.topic/plant.*", "read:*/*", "write:*/*", "configure:*/mqtt-*"))
    assert token.mqtt_publish("plant/x").allowed
    assert token.mqtt_subscribe("a/+/#").allowed
    plain = {"configure": "^mqtt-", "write": ".*", "read": ".*", "topics": {"amq.topic": {"write": "^a\\."}}}
    mine = rights({"mqtt": {"as_virtual_host": "/"}, "amqp091": {"/": plain}})
    assert [mine.mqtt_publish(one).allowed for one in ("a/b", "b/a")] == [True, False]
    assert not mine.mqtt_subscribe("a/b").allowed  # a topic permission that says nothing of reading
    without = rights({"mqtt": {"as_virtual_host": "/"}, "amqp091": {"/": {"write": ".*", "read": ".*"}}})
    assert not without.mqtt_subscribe("a/b").allowed  # its queue cannot be declared


def test_who_has_which_roles() -> None:
    default = DefaultRoles(anonymous=("anon",), guest=("visitor",), authenticated=("member",))
    roles = Roles({}, {"ann": ("own",), "bob": ()}, default)
    assert roles.of(Principal("")) == ("anon",)
    assert roles.of(Principal("guest")) == ("visitor",)
    assert roles.of(Principal("bob")) == ("member",)
    assert roles.of(Principal("ann", roles=("claimed", "own"))) == ("own", "claimed")
    assert roles.of(Principal("eve", scopes=("read:*/*",))) == ()
    assert roles.of(Principal("eve", scopes=("openid",))) == ("member",)
    assert Roles({}, {"guest": ("own",)}, default).of(Principal("guest")) == ("own",)


def test_without_roles_everything_is_allowed_but_for_what_a_token_limits() -> None:
    none = Authorization()
    assert none.rights_of(Principal("x")).mqtt_publish("$SYS/x").allowed
    assert none.rights_of(Principal("x")).unlimited
    assert not none.rights_of(Principal("x", scopes=("read:*/*",))).mqtt_publish("a").allowed
    assert Authorization(Roles({"r": Role()})).rights_of(Principal("x")).mqtt_publish("a").allowed is False


def test_clients_share_their_rights_unless_a_rule_tells_them_apart() -> None:
    given = {"a": Role.model_validate({"mqtt": {"publish": "#"}})}
    given["b"] = Role.model_validate({"mqtt": {"publish": "x/{client_id}"}})
    authorization = Authorization(Roles(given, {"ann": ("a",), "bob": ("b",)}))
    of = authorization.rights_of
    assert of(Principal("ann"), "1") is of(Principal("ann"), "2")
    assert of(Principal("bob"), "1") is not of(Principal("bob"), "2")
    assert of(Principal("ann", fields={"cn": "x"}), "1") is not of(Principal("ann"), "1")
    before = of(Principal("ann"))
    assert not authorization.use(Roles(given, {"ann": ("a",), "bob": ("b",)}))
    assert authorization.use(Roles(given, {"ann": ()}))
    assert authorization.generation == 1
    assert before.mqtt_publish("a").allowed
    assert not of(Principal("ann")).mqtt_publish("a").allowed


def test_the_largest_limit_of_several_roles_counts() -> None:
    mine = rights({"connections_max": 2, "sessions_max": 0}, {"connections_max": 5, "sessions_max": 7}, {})
    assert (mine.connections_max, mine.sessions_max, mine.receive_bytes_per_sec_max) == (5, 0, None)


@pytest.mark.parametrize(
    "given, fault",
    [
        ({"roles": {"r": {"mqtt": {"publish": "a/#/b"}}}}, "not a topic filter"),
        ({"roles": {"r": {"mqtt": {"subscribe": "$share/g/a"}}}}, "write the filter without"),
        ({"roles": {"r": {"amqp091": {"/": {"read": "("}}}}}, "not a regular expression"),
        ({"roles": {"r": {"amqpfast": {"/": {"queues": {"read": "a*b"}}}}}}, "its beginning with a"),
        ({"roles": {"reader": {}}, "default_roles": {"guest": "raeder"}}, "did you mean 'reader'"),
        ({"users": {"ann": {"scram": "x", "roles": ["r"]}}}, "users.ann.roles: unknown role 'r'"),
        ({"roles": {"r": {"mqtt": {"publich": "a"}}}}, "publich"),
    ],
)
def test_what_no_rule_can_be_is_said(given: dict[str, Any], fault: str) -> None:
    with pytest.raises(ValidationError, match=fault.replace("(", "\\(").replace("*", "\\*")):
        Settings.model_validate(given)
