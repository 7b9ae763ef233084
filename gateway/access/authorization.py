"""Which rights a client has: the roles of the configuration, who has which, and what is in force now.

Rules may change while clients are connected: `use` takes others, `generation` moves, and whatever was decided
before is asked again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from gateway.access.principal import Principal
from gateway.access.questions import Authorizer
from gateway.access.rights import AllRights, Rights
from gateway.access.rules import MqttGrant
from gateway.access.scopes import parse_scopes
from gateway.settings.access import DefaultRoles, Role
from gateway.settings.tree import ANONYMOUS, GUEST

COMPILED_MAX: Final = 1_000  # tokens may join roles as they like
KEPT_MAX: Final = 10_000  # rights of clients, each some hundred octets and its compiled rules


class Roles:
    """The roles, and who has which of them by the configuration."""

    def __init__(
        self,
        roles: Mapping[str, Role] | None = None,
        users: Mapping[str, tuple[str, ...]] | None = None,
        default: DefaultRoles | None = None,
    ) -> None:
        """`users`: the names of roles by that of a user, of every user of the configuration."""
        self.roles = dict(roles or {})
        self.users = dict(users or {})
        self.default = default or DefaultRoles()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Roles) and vars(self) == vars(other)

    __hash__ = None  # type: ignore[assignment]

    def of(self, principal: Principal) -> tuple[str, ...]:
        """The names of a client's roles. Who has rights of its own, by a token, has no default ones."""
        own = (*self.users.get(principal.name or ANONYMOUS, ()), *principal.roles)
        if own or parse_scopes(principal.scopes):
            return tuple(dict.fromkeys(own))
        if not principal.name:
            return self.default.anonymous
        if principal.name == GUEST and GUEST not in self.users:
            return self.default.guest
        return self.default.authenticated


class Authorization:
    """What is in force. `generation` moves when it changes."""

    def __init__(self, roles: Roles | None = None, authorizer: Authorizer | None = None) -> None:
        """`authorizer` knows what no role says; None: there is nobody to ask."""
        self.generation = 0
        self.authorizer = authorizer
        self.roles = roles or Roles()
        self.connections: dict[str, int] = {}  # by user, of those that have rules
        self._kept: dict[object, Rights] = {}
        self._holders: dict[str, bool] = {}  # by user, as its last login or its configured roles have it
        self._compiled: dict[tuple[str, ...], MqttGrant] = {}  # by roles; as many as are given together
        self._by_client = self._of_clients()

    def use(self, roles: Roles) -> bool:
        """Other rules are in force from now on. False: they are the same."""
        if roles == self.roles:
            return False
        self.roles = roles
        self.generation += 1
        self._kept.clear()
        self._holders.clear()
        self._compiled = {}
        self._by_client = self._of_clients()
        return True

    def _of_clients(self) -> frozenset[str]:
        """Roles by which two clients of one user may have different rights."""
        return frozenset(
            name
            for name, role in self.roles.roles.items()
            if role.mqtt.as_virtual_host is not None or "{client_id}" in role.model_dump_json()
        )

    @property
    def in_force(self) -> bool:
        """There is a role, or somebody to ask, so there are rules."""
        return bool(self.roles.roles) or self.authorizer is not None

    def rights_of(self, principal: Principal, client_id: str = "") -> Rights:
        """What a client may do; the same object for all that may do the same."""
        names = self.roles.of(principal) if self.in_force else ()
        if not (principal.scopes or self.authorizer or self._by_client.intersection(names)):
            client_id = ""
        key = (principal.name, names, principal.scopes, tuple(principal.fields.items()), client_id)
        found = self._kept.get(key)
        if found is None:
            if len(self._kept) >= KEPT_MAX:
                self._kept.clear()
            found = self._kept[key] = self._made(principal, names, client_id, key)
        if self.in_force:
            self._note_holder(principal.name, names)
        return found

    def may_hold(self, user: str | None) -> bool:
        """Return True if a full queue or session of this user may make publishers wait.

        None stands for the operator. The roles that a token or an HTTP back end gave at the last login
        count until the rules change; after that, and after a restart, those of the configuration do.
        """
        if user is None or not self.in_force:
            return True
        found = self._holders.get(user)
        if found is None:
            found = self._note_holder(user, self.roles.of(Principal(user)))
        return found

    def _note_holder(self, user: str, names: tuple[str, ...]) -> bool:
        if len(self._holders) >= KEPT_MAX:
            self._holders.clear()
        roles = self.roles.roles
        found = self._holders[user] = any(roles[name].hold for name in names if name in roles)
        return found

    def enters(self, user: str) -> None:
        """Another connection of that user."""
        self.connections[user] = self.connections.get(user, 0) + 1

    def leaves(self, user: str) -> None:
        """One of them has gone."""
        self.connections[user] -= 1
        if not self.connections[user]:
            del self.connections[user]

    def full(self, rights: Rights, user: str) -> bool:
        """Whether a user has as many connections as its roles let it have."""
        most = rights.connections_max
        return bool(most) and self.connections.get(user, 0) >= (most or 0)

    def _made(self, principal: Principal, names: tuple[str, ...], client_id: str, key: object) -> Rights:
        if not self.in_force and not parse_scopes(principal.scopes):
            return AllRights(key=principal.name)
        roles = [(name, self.roles.roles[name]) for name in names if name in self.roles.roles]
        if len(self._compiled) >= COMPILED_MAX:
            self._compiled = {}
        return Rights(
            principal,
            roles,
            client_id=client_id,
            key=key,
            authorizer=self.authorizer,
            shared=self._compiled,
        )


class CurrentRights:
    """What one client may do, found anew when the rules have changed."""

    __slots__ = ("_authorization", "_generation", "_rights")

    def __init__(self, authorization: Authorization) -> None:
        self._authorization = authorization
        self._generation = -1  # of the rules that the rights are by
        self._rights: Rights | None = None

    def of(self, principal: Principal | None, client_id: str = "") -> Rights:
        """As the rules are now. A client that has not been let in is not asked about: AssertionError."""
        rights, authorization = self._rights, self._authorization
        if rights is None or self._generation != authorization.generation:
            assert principal is not None
            self._generation = authorization.generation
            rights = self._rights = authorization.rights_of(principal, client_id)
        return rights

    def forget(self) -> None:
        """The client has proved anew who it is, and perhaps with other rights."""
        self._rights = None
