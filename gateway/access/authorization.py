"""Authorization of clients: the configured roles, the users that have them, and the rules now in force.

Rules may change while clients are connected: `use` replaces the roles and increments `generation`. Callers
that have stored results of checks must then repeat the checks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from gateway.access.http_authorization import Authorizer
from gateway.access.principal import Principal
from gateway.access.rights import AllRights, Rights
from gateway.access.rules import MqttGrant
from gateway.access.scopes import parse_scopes
from gateway.settings.access import DefaultRoles, Role
from gateway.settings.tree import ANONYMOUS, GUEST

COMPILED_MAX: Final = 1_000  # combinations of roles with compiled rules; tokens may combine roles freely
KEPT_MAX: Final = 10_000  # rights of clients, each some hundred bytes and its compiled rules


class Roles:
    """Configured roles, the names of each user's roles, and the default roles of clients without roles."""

    def __init__(
        self,
        roles: Mapping[str, Role] | None = None,
        users: Mapping[str, tuple[str, ...]] | None = None,
        default: DefaultRoles | None = None,
    ) -> None:
        """Set the roles by name, the role names by configured user, and the default roles."""
        self.roles = dict(roles or {})
        self.users = dict(users or {})
        self.default = default or DefaultRoles()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Roles) and vars(self) == vars(other)

    __hash__ = None  # type: ignore[assignment]

    def of(self, principal: Principal) -> tuple[str, ...]:
        """Return the names of a client's roles.

        The default roles apply only to a client that has neither a role nor a scope with rights.
        """
        own = (*self.users.get(principal.name or ANONYMOUS, ()), *principal.roles)
        if own or parse_scopes(principal.scopes):
            return tuple(dict.fromkeys(own))
        if not principal.name:
            return self.default.anonymous
        if principal.name == GUEST and GUEST not in self.users:
            return self.default.guest
        return self.default.authenticated


class Authorization:
    """Roles and authorizer in force.

    `generation` is incremented whenever the roles change; stored results of checks are invalid then.
    """

    def __init__(self, roles: Roles | None = None, authorizer: Authorizer | None = None) -> None:
        """Put the roles in force.

        `authorizer` decides on actions that no rule allows or denies; with None they are denied.
        """
        self.generation = 0
        self.authorizer = authorizer
        self.roles = roles or Roles()
        self.connections: dict[str, int] = {}  # open connections by user, of clients whose rules limit them
        self._cache: dict[object, Rights] = {}
        self._holders: dict[str, bool] = {}  # by user, from its roles at the last login or by configuration
        self._compiled: dict[tuple[str, ...], MqttGrant] = {}  # by combination of roles
        self._by_client = self._of_clients()

    def use(self, roles: Roles) -> bool:
        """Replace the roles in force, and return True.

        Return False if `roles` equals those in force.
        """
        if roles == self.roles:
            return False
        self.roles = roles
        self.generation += 1
        self._cache.clear()
        self._holders.clear()
        self._compiled = {}
        self._by_client = self._of_clients()
        return True

    def _of_clients(self) -> frozenset[str]:
        """Return the names of the roles whose rules depend on the client identifier.

        Two clients of one user may have different rights by such a role.
        """
        return frozenset(
            name
            for name, role in self.roles.roles.items()
            if role.mqtt.as_virtual_host is not None or "{client_id}" in role.model_dump_json()
        )

    @property
    def is_configured(self) -> bool:
        """True if a role or an authorizer is configured. Otherwise everything is allowed."""
        return bool(self.roles.roles) or self.authorizer is not None

    def rights_of(self, principal: Principal, client_id: str = "") -> Rights:
        """Return the rights of a client by the rules in force.

        Clients with the same rights share one object.
        """
        names = self.roles.of(principal) if self.is_configured else ()
        if not (principal.scopes or self.authorizer or self._by_client.intersection(names)):
            client_id = ""
        key = (principal.name, names, principal.scopes, tuple(principal.fields.items()), client_id)
        found = self._cache.get(key)
        if found is None:
            if len(self._cache) >= KEPT_MAX:
                self._cache.clear()
            found = self._cache[key] = self._compile_rights(principal, names, client_id, key)
        if self.is_configured:
            self._note_holder(principal.name, names)
        return found

    def may_hold(self, user: str | None) -> bool:
        """Return True if publishers to a full queue or session of `user` may be held, that is, not read.

        This is the setting `hold` of the user's roles. With None, the user is the operator, whose queues may
        always hold publishers. The roles that a back end gave at the user's last login count, until the rules
        change or the process restarts; then the roles in the configuration count.
        """
        if user is None or not self.is_configured:
            return True
        found = self._holders.get(user)
        if found is None:
            found = self._note_holder(user, self.roles.of(Principal(user)))
        return found

    def _note_holder(self, user: str, names: tuple[str, ...]) -> bool:
        """Return True if a user with the roles `names` may hold publishers while its queues are full.

        The result is cached for `may_hold`.
        """
        if len(self._holders) >= KEPT_MAX:
            self._holders.clear()
        roles = self.roles.roles
        found = self._holders[user] = any(roles[name].hold for name in names if name in roles)
        return found

    def add_connection(self, user: str) -> None:
        """Count a new connection of this user."""
        self.connections[user] = self.connections.get(user, 0) + 1

    def remove_connection(self, user: str) -> None:
        """Count a connection of this user as closed."""
        self.connections[user] -= 1
        if not self.connections[user]:
            del self.connections[user]

    def is_at_connections_max(self, rights: Rights, user: str) -> bool:
        """Return True if a user already has as many connections as `rights` permit."""
        most = rights.connections_max
        return bool(most) and self.connections.get(user, 0) >= (most or 0)

    def _compile_rights(
        self, principal: Principal, names: tuple[str, ...], client_id: str, key: object
    ) -> Rights:
        """Return a new Rights object for a client with the roles `names`.

        `key` identifies the rights in caches: clients with an equal key have the same rights.
        """
        if not self.is_configured and not parse_scopes(principal.scopes):
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
    """Rights of one client, which are computed again whenever the rules have changed."""

    __slots__ = ("_authorization", "_generation", "_rights")

    def __init__(self, authorization: Authorization) -> None:
        self._authorization = authorization
        self._generation = -1  # of the rules from which _rights was computed
        self._rights: Rights | None = None

    def of(self, principal: Principal | None, client_id: str = "") -> Rights:
        """Return the client's rights by the rules in force.

        `principal` must not be None if the rights have to be computed, which is the case at the first call
        and after the rules have changed.
        """
        rights, authorization = self._rights, self._authorization
        if rights is None or self._generation != authorization.generation:
            assert principal is not None
            self._generation = authorization.generation
            rights = self._rights = authorization.rights_of(principal, client_id)
        return rights

    def forget(self) -> None:
        """Discard the stored rights, because a client that has reauthenticated may have other rights."""
        self._rights = None
