"""State of replicas in PostgreSQL: sessions, retained messages and take-overs, against the targets.

A commit waits at least 1 ms for the disk (`commit_delay`), as on a disk that is slower than this machine's. A
replica is a process with LANES connections, each used by one thread; a thread commits GROUP operations in one
transaction and begins the next one. Operations of one kind in a group are one statement over arrays.

The figures of sessions and retained messages are taken with SESSIONS and TOPICS rows in the tables.
"""

from __future__ import annotations

import multiprocessing
import random
import threading
import time
from collections.abc import Callable
from multiprocessing.context import SpawnContext
from pathlib import Path
from typing import Any, Final, LiteralString, NamedTuple

import psycopg

from gateway.state.interface import (
    OpenSession,
    Operation,
    OperationOutcome,
    Reply,
    Retain,
    SessionKey,
    WillRecord,
)
from gateway.state.postgresql import PostgreSQLState, Server
from tests.benchmarks.report import Figure, median
from tests.interop.servers import PostgreSQL

SESSIONS: Final = 100_000
TOPICS: Final = 1_000_000
PER_LEVEL: Final = 1_000  # topics r/N/0 … r/N/999
LANES: Final = 4
GROUP: Final = 64
WINDOW: Final = 1_000
BODY: Final = bytes(128)
TAKE_OVERS: Final = 300
OPTIONS: Final = ("commit_delay=1000", "commit_siblings=0", "shared_buffers=256MB", "max_wal_size=4GB")
OPENS_MIN: Final = 2_000.0
RETAINED_MIN: Final = 5_000.0
QUERY_MS_MAX: Final = 20.0
FRESH_SECS_MAX: Final = 5.0
TAKE_OVER_MS_MAX: Final = 100.0
SESSION_BYTES_MAX: Final = 20_000.0

SCHEMA: Final[LiteralString] = """
CREATE SEQUENCE epoch;
CREATE TABLE session (
    client text PRIMARY KEY, epoch bigint NOT NULL, owner text NOT NULL, previous text NOT NULL DEFAULT '',
    username text NOT NULL, expiry double precision NOT NULL, expires_at double precision,
    will bytea, will_at double precision
) WITH (fillfactor = 80);
CREATE INDEX ON session (expires_at) WHERE expires_at IS NOT NULL;
CREATE INDEX ON session (will_at) WHERE will_at IS NOT NULL;
CREATE TABLE subscription (client text, filter text, options integer NOT NULL, PRIMARY KEY (client, filter));
CREATE TABLE retained (
    topic text COLLATE "C" PRIMARY KEY, version bigint NOT NULL, message bytea NOT NULL, levels text[]
);
CREATE FUNCTION levels_of(topic text) RETURNS text[] IMMUTABLE LANGUAGE sql AS $$
    SELECT array_agg(n || ':' || level) || ('#' || count(*))
    FROM unnest(string_to_array(topic, '/')) WITH ORDINALITY AS one (level, n)
$$;
"""
FILL: Final[LiteralString] = """
INSERT INTO session (client, epoch, owner, username, expiry, will)
    SELECT 'client-' || n, nextval('epoch'), 'none', 'user', 3600, decode(repeat('ab', 64), 'hex')
    FROM generate_series(0, {sessions} - 1) AS n;
INSERT INTO subscription
    SELECT 'client-' || n, filter, 1
    FROM generate_series(0, {sessions} - 1) AS n, unnest(ARRAY['a/' || n || '/+', 'b/#']) AS filter;
INSERT INTO retained
    SELECT topic, 0, decode(repeat('ab', 128), 'hex'), levels_of(topic)
    FROM (SELECT 'r/' || n / {per} || '/' || n % {per} AS topic
          FROM generate_series(0, {topics} - 1) AS n) AS given;
CREATE INDEX retained_levels ON retained USING gin (levels);
VACUUM ANALYZE;
"""
OPEN: Final[LiteralString] = """
INSERT INTO session (client, epoch, owner, username, expiry, will)
    SELECT client, nextval('epoch'), %s, 'user', 3600, %b
    FROM unnest(%s::text[]) AS op (client) ORDER BY client
ON CONFLICT (client) DO UPDATE SET epoch = excluded.epoch, previous = session.owner, owner = excluded.owner,
    expires_at = NULL, will = excluded.will, will_at = NULL
RETURNING client, epoch, previous
"""
SUBSCRIBE: Final[LiteralString] = """
INSERT INTO subscription SELECT client, filter, 1
    FROM unnest(%s::text[], %s::text[]) AS op (client, filter) ORDER BY client, filter
ON CONFLICT (client, filter) DO UPDATE SET options = excluded.options
"""
RETAIN: Final[LiteralString] = """
INSERT INTO retained
    SELECT topic, pg_current_xact_id()::text::bigint, message, levels_of(topic)
    FROM unnest(%s::text[], %b::bytea[]) AS op (topic, message) ORDER BY topic
ON CONFLICT (topic) DO UPDATE SET version = excluded.version, message = excluded.message
"""
BY_LEVELS: Final[LiteralString] = "SELECT topic, message FROM retained WHERE levels @> %s"
BY_PREFIX: Final[LiteralString] = (
    "SELECT topic, message FROM retained WHERE topic >= %s AND topic < %s AND topic ~ %s"
)
RELEASE: Final[LiteralString] = "UPDATE session SET previous = '' WHERE client = %s AND previous = %s"

Connection = psycopg.Connection[tuple[Any, ...]]
Work = Callable[[Connection, random.Random, str], None]


class Rate(NamedTuple):
    """What all threads of one run did per second."""

    operations: float
    commits: float


def _open(connection: Connection, chance: random.Random, owner: str) -> None:
    clients = [f"client-{n}" for n in chance.sample(range(SESSIONS), GROUP)]
    with connection.pipeline(), connection.transaction():
        connection.execute(OPEN, (owner, BODY, clients))


def _open_with_state(connection: Connection, chance: random.Random, owner: str) -> None:
    clients = [f"client-{n}" for n in chance.sample(range(SESSIONS), GROUP)]
    filters = [f"a/{client}/+" for client in clients] + ["b/#"] * GROUP
    with connection.pipeline(), connection.transaction():
        connection.execute(OPEN, (owner, BODY, clients))
        connection.execute(SUBSCRIBE, (clients + clients, filters))


def _open_singly(connection: Connection, chance: random.Random, owner: str) -> None:
    """GROUP statements, pipelined."""
    with connection.pipeline(), connection.transaction():
        for n in sorted(chance.sample(range(SESSIONS), GROUP)):
            connection.execute(OPEN, (owner, BODY, [f"client-{n}"]))


def _open_alone(connection: Connection, chance: random.Random, owner: str) -> None:
    """GROUP transactions, as with a pool that gives a connection to each operation."""
    for n in chance.sample(range(SESSIONS), GROUP):
        connection.execute(OPEN, (owner, BODY, [f"client-{n}"])).fetchall()


def _retain(connection: Connection, chance: random.Random, owner: str) -> None:
    topics = [f"r/{n // PER_LEVEL}/{n % PER_LEVEL}" for n in chance.sample(range(TOPICS), GROUP)]
    with connection.pipeline(), connection.transaction():
        connection.execute(RETAIN, (topics, [BODY] * GROUP))


WORK: Final[dict[str, Work]] = {
    "open": _open,
    "open with state": _open_with_state,
    "open singly": _open_singly,
    "open alone": _open_alone,
    "retain": _retain,
}


def _connect(url: str) -> Connection:
    connection = psycopg.connect(url, autocommit=True)
    connection.prepare_threshold = 0
    return connection


def _lane(url: str, name: str, work: str, seconds: float, ready: Any, told: Any) -> None:
    chance, commits, aborted = random.Random(name), 0, 0
    with _connect(url) as connection:
        WORK[work](connection, chance, name)
        ready.wait()
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            try:
                WORK[work](connection, chance, name)
            except psycopg.errors.DeadlockDetected:
                aborted += 1
            else:
                commits += 1
    told.put(commits)


def _replica(url: str, name: str, work: str, lanes: int, seconds: float, ready: Any, told: Any) -> None:
    """Run the lanes of one replica, in a process of its own."""
    threads = [
        threading.Thread(target=_lane, args=(url, f"{name}.{lane}", work, seconds, ready, told))
        for lane in range(lanes)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _rate(url: str, work: str, seconds: float, *, replicas: int = 1, lanes: int = LANES) -> Rate:
    context = multiprocessing.get_context("spawn")
    ready, told = context.Barrier(replicas * lanes), context.Queue()
    processes = [
        context.Process(target=_replica, args=(url, f"replica{n}", work, lanes, seconds, ready, told))
        for n in range(replicas)
    ]
    for process in processes:
        process.start()
    commits = sum(told.get() for _ in range(replicas * lanes))
    for process in processes:
        process.join()
    return Rate(commits * GROUP / seconds, commits / seconds)


def _rates(
    url: str, what: str, work: str, seconds: float, repeat: int, least: float | None, **sizes: int
) -> Figure:
    found = [_rate(url, work, seconds, **sizes) for _ in range(repeat)]
    rates = [one.operations for one in found]
    middle = median(rates)
    more = {"least": round(min(rates)), "most": round(max(rates))}
    if work != "open alone":
        more["commits/s"] = round(median([one.commits for one in found]))
    ratio = None if least is None else middle / least
    return Figure(what, "/s", middle, least or 0.0, ratio, None if least is None else 1.0, more)


def _within(what: str, unit: str, values: list[float], most: float | None) -> Figure:
    """A figure of which less is better."""
    middle = median(values)
    ratio = None if most is None else most / middle
    more = {"least": f"{min(values):.3g}", "most": f"{max(values):.3g}"}
    return Figure(what, unit, middle, most or 0.0, ratio, None if most is None else 1.0, more)


def _timed_ms(
    connection: Connection, query: LiteralString, given: tuple[Any, ...], repeat: int
) -> list[float]:
    found = []
    for _ in range(3 * repeat):
        begin = time.perf_counter()
        connection.execute(query, given).fetchall()
        found.append(1_000 * (time.perf_counter() - begin))
    return found


def _queries(connection: Connection, repeat: int) -> list[Figure]:
    """Wildcards over all topics, by either index."""
    last = "9" * len(str(PER_LEVEL))  # sorts behind all topics of the level
    rows = (
        ("r/5/+ by levels (GIN)", BY_LEVELS, (["1:r", "2:5", "#3"],), QUERY_MS_MAX),
        ("r/5/+ by prefix (btree)", BY_PREFIX, ("r/5/", f"r/5/{last}", "^r/5/[^/]*$"), QUERY_MS_MAX),
        ("r/+/17 by levels (GIN)", BY_LEVELS, (["1:r", "3:17", "#3"],), QUERY_MS_MAX),
        ("r/+/17 by prefix (btree)", BY_PREFIX, ("r/", f"r/{last}", "^r/[^/]*/17$"), None),
    )
    return [
        _within(what, "ms", _timed_ms(connection, query, given, repeat), most)
        for what, query, given, most in rows
    ]


def _serve(url: str, told: Any) -> None:
    """Begin as a replica: connect, open a session, read what it has and what is retained for it."""
    with _connect(url) as connection:
        connection.execute(OPEN, ("fresh", BODY, ["client-7"])).fetchall()
        connection.execute(
            "SELECT filter, options FROM subscription WHERE client = %s", ("client-7",)
        ).fetchall()
        found = connection.execute(BY_LEVELS, (["1:r", "2:5", "#3"],)).fetchall()
    told.put(len(found))


def _fresh(context: SpawnContext, url: str) -> float:
    told = context.Queue()
    begin = time.monotonic()
    process = context.Process(target=_serve, args=(url, told))
    process.start()
    if told.get() != PER_LEVEL:
        raise OSError("a fresh replica does not find all retained messages")
    secs = time.monotonic() - begin
    process.join()
    return secs


def _old_owner(url: str, ready: Any) -> None:
    """Answer each notification of a take-over: release the session, notify the new owner."""
    with _connect(url) as listening, _connect(url) as writing:
        listening.execute("LISTEN before")
        ready.wait()
        for notice in listening.notifies():
            if not notice.payload:
                return
            with writing.pipeline(), writing.transaction():
                writing.execute(RELEASE, (notice.payload, "before"))
            writing.execute("SELECT pg_notify('after', %s)", (notice.payload,))


def _take_overs(url: str) -> list[float]:
    """Milliseconds from the query of a new owner until the old one has released the session."""
    context = multiprocessing.get_context("spawn")
    ready = context.Barrier(2)
    process = context.Process(target=_old_owner, args=(url, ready))
    process.start()
    found = []
    with _connect(url) as listening, _connect(url) as writing:
        writing.execute("UPDATE session SET owner = 'before' WHERE client < 'client-2'")
        listening.execute("LISTEN after")
        ready.wait()
        for n in range(TAKE_OVERS):
            client = f"client-{10_000 + n}"
            begin = time.perf_counter()
            ((_, _, previous),) = writing.execute(OPEN, ("after", BODY, [client])).fetchall()
            writing.execute("SELECT pg_notify(%s, %s)", (previous, client))
            for _ in listening.notifies(stop_after=1, timeout=30):
                found.append(1_000 * (time.perf_counter() - begin))
        writing.execute("SELECT pg_notify('before', '')")
    process.join()
    return found


def _p99(values: list[float]) -> float:
    return sorted(values)[int(len(values) * 0.99)]


def _bytes(connection: Connection, what: str) -> Figure:
    """Bytes of a session's rows and their part of the indexes."""
    row = connection.execute(
        "SELECT pg_total_relation_size('session') + pg_total_relation_size('subscription')"
    ).fetchone()
    assert row is not None
    byte_count = row[0] / SESSIONS
    return _within(what, "bytes", [byte_count], SESSION_BYTES_MAX)


class Submitting:
    """The store of the gateway, given operations by one thread, WINDOW of which are on their way."""

    def __init__(self, url: str) -> None:
        self._store = PostgreSQLState(Server(url, "gateway"))
        self._chance = random.Random(1)
        self._done = 0

    def __enter__(self) -> Submitting:
        self._store.start(lambda function: function(), lambda notice: None)
        return self

    def __exit__(self, *_: object) -> None:
        self._store.stop()

    def open_session(self) -> OpenSession:
        """Return an operation."""
        key = SessionKey("mqtt", f"client-{self._chance.randrange(SESSIONS)}")
        return OpenSession(key, "replica", "user", "", False, 3_600.0, "queue", WillRecord(BODY, 0.0))

    def retain(self) -> Retain:
        """Return an operation."""
        n = self._chance.randrange(TOPICS)
        return Retain(f"r/{n // PER_LEVEL}/{n % PER_LEVEL}", BODY)

    def rate(self, operation: Callable[[], Operation[Any]], seconds: float) -> float:
        """Return how many were done in a second. Raises OSError if one was not."""
        credit, failed = threading.Semaphore(WINDOW), threading.Event()

        def done(reply: Reply[Any]) -> None:
            if reply.verdict is not OperationOutcome.DONE:
                failed.set()
            credit.release()

        count, begin = 0, time.monotonic()
        while time.monotonic() < begin + seconds:
            credit.acquire()
            self._store.submit(operation(), done)
            count += 1
        for _ in range(WINDOW):
            credit.acquire()
        if failed.is_set():
            raise OSError("the store does not take an operation")
        return count / (time.monotonic() - begin)


def _store_rates(url: str, secs: float, repeat: int) -> list[Figure]:
    """What `gateway.state` makes of it, in one process."""
    with Submitting(url) as store:
        figures = []
        for what, operation, least in (
            ("session opens by gateway.state", store.open_session, OPENS_MIN),
            ("retained writes by gateway.state", store.retain, RETAINED_MIN),
        ):
            rates = [store.rate(operation, secs) for _ in range(repeat)]
            middle = median(rates)
            more = {"least": round(min(rates)), "most": round(max(rates))}
            figures.append(Figure(what, "/s", middle, least, middle / least, 1.0, more))
        return figures


def measure(folder: Path, seconds: float, repeat: int) -> list[Figure]:
    """Medians of `repeat` runs, each of half of `seconds`."""
    secs = seconds / 2
    with PostgreSQL(fsync=True, options=OPTIONS) as server, _connect(server.url) as connection:
        url = server.url
        connection.execute(SCHEMA, prepare=False)
        for statement in FILL.format(sessions=SESSIONS, topics=TOPICS, per=PER_LEVEL).split(";")[:-1]:
            connection.execute(statement.encode())
        figures = [_bytes(connection, "a session with a will and two subscriptions")]
        context = multiprocessing.get_context("spawn")
        fresh = [_fresh(context, url) for _ in range(repeat)]
        figures.append(_within("a fresh replica serves", "s", fresh, FRESH_SECS_MAX))
        figures += _queries(connection, repeat)
        for replicas in (1, 3, 10):
            what = f"session opens, {replicas} {'replica' if replicas == 1 else 'replicas'}"
            figures.append(_rates(url, what, "open", secs, repeat, OPENS_MIN, replicas=replicas))
        figures += [
            _rates(url, "session opens with two subscriptions", "open with state", secs, repeat, OPENS_MIN),
            _rates(url, "retained writes", "retain", secs, repeat, RETAINED_MIN),
            _rates(url, "retained writes, 3 replicas", "retain", secs, repeat, RETAINED_MIN, replicas=3),
            _rates(url, "opens, a statement each, pipelined", "open singly", secs, repeat, None),
            _rates(url, "opens, a transaction each", "open alone", secs, repeat, None),
            _rates(url, "opens, a transaction each, 16 threads", "open alone", secs, repeat, None, lanes=16),
        ]
        waits = [_take_overs(url) for _ in range(repeat)]
        figures.append(_within("take-over, p50", "ms", [median(one) for one in waits], None))
        figures.append(_within("take-over, p99", "ms", [_p99(one) for one in waits], TAKE_OVER_MS_MAX))
        figures.append(_bytes(connection, "the same, opened thousands of times each"))
        figures += _store_rates(url, secs, repeat)
    return figures
