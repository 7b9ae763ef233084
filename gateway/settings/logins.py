"""Logins: how often one may fail, and how many may wait for the hash of their password."""

from __future__ import annotations

from pydantic import Field

from gateway.settings.limits import Section


class Logins(Section):
    """What guessing costs, the same in all protocols. Clients on this machine are not counted."""

    failures_max: int = Field(10, ge=0)
    """Wrong logins with one user name from one address in `failure_window_secs`; then that name is refused
    from there for `refused_secs`. 0: any number. From other addresses the user still gets in."""
    address_failures_max: int = Field(100, ge=0)
    """The same from one address (of IPv6: its /64) with any names: many clients may stand behind it. Users
    that were right from there within a day still get in. 0: any number."""
    negotiation_failures_max: int = Field(5, ge=0)
    """AMQP/Fast: broken negotiations from one address in `failure_window_secs`; then nobody from there is let
    in for `refused_secs`, unless a user was right from there within a day. 0: any number."""
    failure_window_secs: float = Field(60.0, gt=0)
    """In which failures are counted."""
    refused_secs: float = Field(60.0, gt=0)
    """How long a name or an address is refused; attempts meanwhile cost no hash and do not prolong it."""
    delay_secs: float = Field(0.5, ge=0, le=5)
    """Each earlier failure of the user, from wherever, or of the address makes a login wait this much longer,
    up to four times, unless the user was right from there within a day."""
    waiting_max: int = Field(128, ge=1)
    """Logins that wait for a hash (some 50 ms each). Addresses take turns, and when it is full
    the one with most of them loses its last; who was right before goes first."""
