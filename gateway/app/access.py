"""Users of the configuration, as the broker's access wants them."""

from __future__ import annotations

from gateway.access.authentication import Access, is_hash
from gateway.access.authorization import Roles
from gateway.access.scram import Keys, parse_keys
from gateway.errors import ConfigurationError
from gateway.settings import Settings, User


def access_of(settings: Settings) -> Access:
    """Who may connect. Raises ConfigurationError for secrets that cannot be read, or are none."""
    hashes = {name: _hash_of(name, user) for name, user in settings.users.items()}
    keys = {name: _keys_of(name, user) for name, user in settings.users.items()}
    scram = {name: found for name, found in keys.items() if found is not None}
    return Access(hashes, guest=settings.guest, scram=scram, logins=settings.logins)


def roles_of(settings: Settings) -> Roles:
    """The roles, and who has which by the configuration."""
    users = {name: user.roles for name, user in settings.users.items()}
    return Roles(settings.roles, users, settings.default_roles)


def _hash_of(name: str, user: User) -> str:
    # A password put where its hash belongs would be found out by a client only, and as a wrong password.
    text = user.hash()
    if (text or not user.scram_keys()) and not is_hash(text):
        key = "password_hash" if user.password_hash_file is None else "password_hash_file"
        raise ConfigurationError(f"users.{name}.{key}: this is no argon2 hash; `gateway passwd` makes one")
    return text


def _keys_of(name: str, user: User) -> Keys | None:
    text = user.scram_keys()
    try:
        return parse_keys(text) if text else None
    except ValueError as error:
        raise ConfigurationError(f"users.{name}.scram: {error}; `gateway passwd --scram` makes it") from error
