"""Queries of the shared state.

Each is one statement outside of a transaction; a few are two statements, or several for an MQTT filter.
"""

from __future__ import annotations

from typing import Any, Final

from gateway.state.database import Database, OperationStatement
from gateway.state.interface import (
    AbsentSession,
    DeadLetter,
    FindAbsent,
    FindLetters,
    FindOwned,
    FindSession,
    FindSuperseded,
    ListLetters,
    ListReplicas,
    MatchRetained,
    Owned,
    Owner,
    ReplicaView,
    Retained,
    SessionCounts,
    SessionKey,
    SessionView,
    SharedFilters,
    UserSessions,
    WeighLetters,
    WeighRetained,
    WeighSessions,
)

SESSION: Final = (
    "{op} SELECT t.epoch, t.owner, t.holder, t.holder_epoch, t.connected, t.login, t.place, t.queue,"
    " t.expires_at - state_now(), t.given_back,"
    " EXISTS (SELECT 1 FROM will AS w WHERE w.domain = t.domain AND w.client = t.client AND w.claimed = 1)"
    " FROM op JOIN session AS t ON t.domain = op.domain AND t.client = op.client"
)
TAKEN: Final = (
    "{op} SELECT t.domain, t.client, t.holder_epoch FROM op JOIN session AS t ON t.holder = op.replica"
    " WHERE t.holder_epoch <> t.epoch LIMIT "
)
OWNED: Final = (
    "{op} SELECT t.domain, t.client, t.epoch, t.expiry, t.queue FROM session AS t"
    " WHERE t.owner = (SELECT replica FROM op) AND t.connected = 1"
    " AND (t.domain, t.client) > ((SELECT domain FROM op), (SELECT client FROM op))"
    " ORDER BY t.domain, t.client LIMIT "
)
ABSENT: Final = (
    "{op} SELECT t.domain, t.client, t.epoch, t.login, t.queue FROM session AS t WHERE t.connected = 0"
    " AND (t.domain, t.client) > ((SELECT domain FROM op), (SELECT client FROM op))"
    " ORDER BY t.domain, t.client LIMIT "
)
SUBSCRIPTIONS: Final = (
    "{op} SELECT t.domain, t.client, t.filter, t.options"
    " FROM op JOIN subscription AS t ON t.domain = op.domain AND t.client = op.client"
)
SESSION_WEIGHTS: Final = (
    "{op} SELECT login, expiry <= 0 AND opening <> '' OR connected = 1 AND owner = (SELECT replica FROM op),"
    " count(*), CAST(sum(subscriptions) AS bigint), CAST(sum(weight) AS bigint) FROM session GROUP BY 1, 2"
)
WILL_WEIGHTS: Final = (
    "{op} SELECT login, CAST(sum(weight) AS bigint) FROM will"
    " WHERE served = 1 AND (due_at IS NOT NULL OR replica <> (SELECT replica FROM op)) GROUP BY login"
)
SHARED: Final = (
    "{op} SELECT DISTINCT filter FROM subscription WHERE substr(filter, 1, 7) = '$share/'"
    " AND filter > (SELECT after FROM op) ORDER BY filter LIMIT "
)
REPLICAS: Final = (
    "SELECT replica, name, address, version, state_now() - seen FROM replica WHERE dead = 0 ORDER BY replica"
)
LETTER: Final = "{op} SELECT t.id, t.route, t.login, t.weight, t.at{} FROM "
LETTERS: Final = LETTER + "op JOIN dead_letter AS t ON t.id = op.id"
CONTENTS: Final = ", t.reason, t.message"
WEIGHTS: Final = "SELECT login, count(*), CAST(sum(weight) AS bigint) FROM dead_letter GROUP BY login"
RETAINED_WEIGHTS: Final = (
    "SELECT login, count(*), CAST(sum(weight) AS bigint) FROM retained WHERE length(message) > 0"
    " AND (expires_at IS NULL OR expires_at > (SELECT state_now())) GROUP BY login"
)
OLDEST: Final = (0.0, "")
NEWEST: Final = (1e15, "")  # later than any time


def run_query(database: Database, query: object) -> Any:
    """Run a query and return the value of its reply. Raises LostError and RefusedError."""
    if isinstance(query, FindSession):
        return _session(database, query.key)
    if isinstance(query, FindSuperseded):
        rows = database.run(
            [OperationStatement(f"{TAKEN}{query.limit}", "replica text", [(query.replica,)])]
        )[0]
        return [(SessionKey(domain, client), epoch) for domain, client, epoch in rows]
    if isinstance(query, FindOwned):
        parameters = [(query.replica, *query.after)]
        call = OperationStatement(
            f"{OWNED}{query.limit}", "replica text, domain text, client text", parameters
        )
        return [Owned(SessionKey(*row[:2]), *row[2:]) for row in database.run([call])[0]]
    if isinstance(query, FindAbsent):
        return _find_absent(database, query)
    if isinstance(query, SharedFilters):
        call = OperationStatement(f"{SHARED}{query.limit}", "after text", [(query.after,)])
        return [topic_filter for (topic_filter,) in database.run([call])[0]]
    if isinstance(query, ListReplicas):
        return [ReplicaView(*row) for row in database.run([OperationStatement(REPLICAS)])[0]]
    if isinstance(query, MatchRetained):
        found = database.match(query)
        return [
            Retained(topic, bytes(message), expires_in, user) for topic, message, expires_in, user in found
        ]
    if isinstance(query, WeighLetters | WeighRetained | WeighSessions):
        return _weights(database, query)
    if isinstance(query, FindLetters):
        columns = CONTENTS if query.has_contents else ""
        call = OperationStatement(_select(LETTERS, columns), "id text", [(id,) for id in query.ids])
    else:
        assert isinstance(query, ListLetters)
        call = _listing(query)
    rows = database.run([call])[0] if call.rows else []
    return [_dead_letter(*row) for row in rows]


def _weights(database: Database, query: WeighLetters | WeighRetained | WeighSessions) -> Any:
    """Return the totals by user that one of these three queries requests, as the value of its reply."""
    if isinstance(query, WeighSessions):
        replica = "replica text", [(query.replica,)]
        rows, wills = database.run(
            [OperationStatement(one, *replica) for one in (SESSION_WEIGHTS, WILL_WEIGHTS)]
        )
        elsewhere = {user: UserSessions(*sums) for user, is_left_out, *sums in rows if not is_left_out}
        for user, will_bytes in wills:
            count, subscriptions, byte_count = elsewhere.get(user, UserSessions())
            elsewhere[user] = UserSessions(count, subscriptions, byte_count + will_bytes)
        return SessionCounts(sum([row[2] for row in rows]), elsewhere)
    call = OperationStatement(WEIGHTS if isinstance(query, WeighLetters) else RETAINED_WEIGHTS)
    return {user: (count, weight) for user, count, weight in database.run([call])[0]}


def _dead_letter(
    id: str, route: str, user: str, weight: int, at: float, reason: bytes = b"", message: bytes = b""
) -> DeadLetter:
    return DeadLetter(id, route, bytes(reason), bytes(message), user, weight, at)


def _select(sql: str, columns: str = "") -> str:
    """Return the beginning of a query of dead letters, which also selects `columns`."""
    return sql.replace("{}", columns)


def _listing(query: ListLetters) -> OperationStatement:
    """Return the statement that reads a page of dead letters.

    The statement has subqueries instead of a join, so that an index provides the order.
    """
    columns, row = "at double precision, id text", query.after or (NEWEST if query.newest_first else OLDEST)
    parameters: tuple[float | str, ...] = row
    than, order = ("<", " DESC") if query.newest_first else (">", "")
    sql = f"{_select(LETTER)}dead_letter AS t"
    sql += f" WHERE (t.at, t.id) {than} ((SELECT at FROM op), (SELECT id FROM op))"
    for name, value in (("route", query.route), ("login", query.user)):
        if value is not None:
            columns += f", {name} text"
            parameters += (value,)
            sql += f" AND t.{name} = (SELECT {name} FROM op)"
    return OperationStatement(
        f"{sql} ORDER BY t.at{order}, t.id{order} LIMIT {query.limit}", columns, [parameters]
    )


def _find_absent(database: Database, query: FindAbsent) -> list[AbsentSession]:
    """Return a page of the sessions of disconnected clients, with their subscriptions."""
    columns = "domain text, client text"
    rows = database.run([OperationStatement(f"{ABSENT}{query.limit}", columns, [query.after])])[0]
    found: dict[SessionKey, AbsentSession] = {}
    for domain, client, epoch, login, queue in rows:
        key = SessionKey(domain, client)
        found[key] = AbsentSession(key, epoch, login, queue, {})
    subscriptions = (
        database.run([OperationStatement(SUBSCRIPTIONS, columns, list(found))])[0] if found else []
    )
    for domain, client, topic_filter, options in subscriptions:
        found[SessionKey(domain, client)].subscriptions[topic_filter] = bytes(options)
    return list(found.values())


def _session(database: Database, key: SessionKey) -> SessionView | None:
    """Return the stored session with this key, or None if there is none."""
    rows = database.run([OperationStatement(SESSION, "domain text, client text", [key])])[0]
    if not rows:
        return None
    epoch, owner, holder, holder_epoch, connected, login, place, queue, expires_in, *rest = rows[0]
    given_back, has_claimed_will = rest
    return SessionView(
        Owner(owner, epoch),
        Owner(holder, holder_epoch) if holder else None,
        bool(connected),
        login,
        place,
        queue,
        expires_in,
        bytes(given_back),
        bool(has_claimed_will),
    )
