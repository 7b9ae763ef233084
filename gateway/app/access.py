"""Users of the configuration, as the broker's access wants them."""

from __future__ import annotations

from gateway.broker.access import Access
from gateway.broker.scram import parse_keys
from gateway.errors import ConfigurationError
from gateway.settings import Settings


def access_of(settings: Settings) -> Access:
    """Who may connect. Raises ConfigurationError for secrets that cannot be read."""
    scram = {}
    for name, user in settings.users.items():
        if text := user.scram_keys():
            try:
                scram[name] = parse_keys(text)
            except ValueError as error:
                raise ConfigurationError(
                    f"users.{name}.scram: {error}; `gateway passwd --scram` makes it"
                ) from error
    return Access(
        {name: user.hash() for name, user in settings.users.items()}, guest=settings.guest, scram=scram
    )
