"""Operations on MQTT sessions: listing, showing and ending them.

A session is idle while its client is disconnected. The session of a connected client is ended only with
`in_use`; the client is then disconnected. Queued messages of an ended session are lost; a delayed will is
published.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import structlog
import trio
from starlette.requests import Request
from starlette.responses import Response

from gateway import clock
from gateway.admin.models import SessionDetail, SessionRemovalResult, SessionRow
from gateway.admin.operations import ServedOperation
from gateway.admin.responses import AbsentError, json_response
from gateway.admin.selection import (
    RemovalPace,
    name_matcher,
    page_of,
    query_of,
    removal_of,
    slices,
    wait_until_durable,
)
from gateway.broker.mqtt.namespace import MqttNamespace
from gateway.broker.mqtt.session import Session
from gateway.operations import REMOVE_SESSIONS, SESSION, SESSIONS

LEAVE_SECS: Final = 10.0  # Longest wait for a client to disconnect.

log = structlog.get_logger()


class SessionsApi:
    """API operations on MQTT sessions.

    `dismiss` disconnects the client of a session. `flush` passes changes to the store and writes to sockets.
    """

    def __init__(
        self,
        namespace: MqttNamespace,
        dismiss: Callable[[Session], None],
        flush: Callable[[], None],
    ) -> None:
        self._namespace = namespace
        self._dismiss = dismiss
        self._flush = flush

    def operations(self) -> Sequence[ServedOperation]:
        """Return the operations on MQTT sessions, each with the function that serves it."""
        return [
            ServedOperation(SESSIONS, self._list, SessionRow),
            ServedOperation(REMOVE_SESSIONS, self._remove, SessionRemovalResult),
            ServedOperation(SESSION, self._show, SessionDetail),
        ]

    async def _show(self, request: Request) -> Response:
        self._namespace.begin(clock.now())
        client = request.path_params["client"]
        session = self._namespace.sessions.get(client)
        if session is None:
            raise AbsentError(f"no session of client {client!r}")
        filters = [
            {
                "filter": name,
                "qos": options.qos,
                "no_local": options.no_local,
                "retain_as_published": options.retain_as_published,
                "retain_handling": options.retain_handling,
                "identifier": options.identifier,
            }
            for name, options in sorted(session.subscriptions.items())
        ]
        return json_response({**session_row(session), "filters": filters})

    async def _list(self, request: Request) -> Response:
        choice, count, after = await query_of(request, SESSIONS.words)
        self._namespace.begin(clock.now())
        sessions = list(self._namespace.sessions.values())
        chosen = _chooser(choice)
        page = await page_of(sessions, chosen, lambda one: one.client_id, session_row, count, after)
        return page.to_response()

    async def _remove(self, request: Request) -> Response:
        """End the sessions that the body of the request selects.

        Return three numbers: sessions that have ended, sessions in use, and sessions that are still ending.
        """
        choice = await removal_of(request, REMOVE_SESSIONS)
        in_use = choice.pop("in_use", False)
        namespace = self._namespace
        namespace.begin(clock.now())
        chosen = _chooser(choice)
        pace = RemovalPace(self._flush)
        removed = busy = 0
        leaving: list[Session] = []
        async for some in slices(list(namespace.sessions.values())):
            for session in some:
                if namespace.sessions.get(session.client_id) is not session or not chosen(session):
                    continue
                if session.outlet is None:
                    await pace.spend(1 + len(session.subscriptions) + len(session) // 100)
                    if session.outlet is not None or namespace.sessions.get(session.client_id) is not session:
                        continue  # It has changed during a turn of the event loop.
                    namespace.discard(session)
                    removed += 1
                elif in_use:
                    session.expiry_secs = 0.0  # Ends the session with its connection.
                    self._dismiss(session)
                    leaving.append(session)
                else:
                    busy += 1
        remaining = await self._wait_until_disconnected(leaving)
        removed += len(leaving) - remaining
        if removed:
            await wait_until_durable(namespace.store, self._flush)
            log.info("operator removed sessions", count=removed, **choice)
        return json_response({"removed": removed, "in_use": busy, "leaving": remaining})

    async def _wait_until_disconnected(self, leaving: list[Session]) -> int:
        """Wait at most LEAVE_SECS seconds until these sessions have ended with their connections.

        Return the number of sessions that still exist.
        """
        self._flush()
        remaining = leaving
        with trio.move_on_after(LEAVE_SECS):
            while remaining := [
                one for one in remaining if self._namespace.sessions.get(one.client_id) is one
            ]:
                await trio.sleep(0.01)
        return len(remaining)


def _idle_secs(session: Session) -> float:
    """Return for how many seconds the client of a session has been disconnected."""
    disconnected_at = session.expires_at - session.expiry_secs
    return max(clock.now() - disconnected_at, 0.0)


def _chooser(choice: Mapping[str, Any]) -> Callable[[Session], bool]:
    """Return a predicate: True for the sessions that the filters in `choice` select."""
    client, user = name_matcher(choice, "client"), name_matcher(choice, "user")
    idle, in_use = choice.get("idle_longer_than"), choice.get("in_use")

    def is_selected(session: Session) -> bool:
        connected = session.outlet is not None
        return (
            client(session.client_id)
            and user(session.user)
            and (in_use is None or in_use is connected)
            and (idle is None or (not connected and _idle_secs(session) > idle))
        )

    return is_selected


def session_row(session: Session) -> dict[str, Any]:
    """Return a session as a JSON object of the API (SessionRow)."""
    away = session.outlet is None
    return {
        "client": session.client_id,
        "user": session.user,
        "in_use": not away,
        "idle_secs": round(_idle_secs(session), 3) if away else None,
        "expires_secs": round(session.expires_at - clock.now(), 3) if away else None,
        "subscriptions": len(session.subscriptions),
        "waiting": len(session),
        "in_flight": len(session.in_flight),
    }
