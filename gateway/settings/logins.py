"""Section `logins`: limits of failed logins, and of logins that wait for the verification of a password."""

from __future__ import annotations

from pydantic import Field

from gateway.settings.limits import Section


class LoginSettings(Section):
    """Protection against password guessing, for all protocols.

    Failed logins from this machine are not counted.
    """

    failures_max: int = Field(10, ge=0)
    """Failed logins with one user name from one address within `failure_window_secs`; then that name is
    refused from that address for `refused_secs`. From other addresses the user can still log in. 0: no limit.
    """
    address_failures_max: int = Field(100, ge=0)
    """Failed logins with any names from one address (of IPv6: its /64), behind which there may be many
    clients. Users that have logged in from there within a day can still log in. 0: no limit."""
    negotiation_failures_max: int = Field(5, ge=0)
    """AMQP/Fast: failed negotiations from one address within `failure_window_secs`; then all clients from
    there are refused for `refused_secs`, unless a user has logged in from there within a day. 0: no limit."""
    failure_window_secs: float = Field(60.0, gt=0)
    """Period in seconds over which failures are counted."""
    refused_secs: float = Field(60.0, gt=0)
    """Time in seconds that a name or an address is refused. Attempts meanwhile compute no hash and do not
    prolong it."""
    delay_secs: float = Field(0.5, ge=0, le=5)
    """Delay of a login in seconds for each earlier failure of the user, from any address, or of the address,
    up to four times this value. A user that has logged in from there within a day is not delayed."""
    waiting_max: int = Field(128, ge=1)
    """Logins that wait for a password hash (some 50 ms each). They are served round robin by address; when it
    is full, the address with most of them loses its last one. Users that have logged in before are served
    first."""
