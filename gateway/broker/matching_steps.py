"""Worst-case cost of one message caused by definitions of users: bindings and topic filters with wildcards.

A *step* is one comparison, of some 20 to 40 ns. Exchanges and the topic tree find most matches without
examining the rest, so an ordinary definition adds few steps or none. Definitions that no index can separate
add more. Steps are counted for the user who makes the definitions, and a definition beyond the user's limit
is refused. Therefore no message of any publisher costs more than the sum of what each user may add.
"""

from __future__ import annotations

from typing import Final

from gateway.model.shares import NO_LIMIT, OPERATOR

SHARED_PREFIX: Final = "$share/"
STATE_STEPS: Final = 2  # for one state of a pattern with any number of levels inside
EXCHANGE_STEPS: Final = 15  # for one exchange bound to another, which each message may visit: some 400 ns
MEMBER_STEPS: Final = 12  # for one member of a shared subscription, whose credit is checked for each message


class MatchingSteps:
    """Number of comparisons (steps) that each user's definitions add to one message in the worst case.

    Definitions are bindings and subscriptions. `user_max` is the limit for one user.
    """

    __slots__ = ("_of_users", "user_max")

    def __init__(self, user_max: int = NO_LIMIT) -> None:
        self.user_max = user_max
        self._of_users: dict[str, int] = {}

    def of(self, user: str | None) -> int:
        """Return the number of steps of a user's definitions; None is the configuration."""
        return self._of_users.get(OPERATOR if user is None else user, 0)

    def refuse_if_full(self, user: str | None, steps: int) -> str:
        """Return "" if a user may add a definition of `steps` steps, otherwise the option that forbids this.

        A definition without steps is always allowed.
        """
        if not steps or self.of(user) + steps <= self.user_max:
            return ""
        return f"limits.matching_steps_per_user_max ({self.user_max})"

    def add(self, user: str | None, steps: int) -> None:
        """Add steps to those of a user; a negative number subtracts them."""
        if not steps:
            return
        name = OPERATOR if user is None else user
        steps_left = self._of_users.get(name, 0) + steps
        if steps_left:
            self._of_users[name] = steps_left
        else:
            del self._of_users[name]


def pattern_steps(pattern: list[str], one: str, many: str) -> int:
    """Return the steps (comparisons) that a pattern in a `Trie` adds to a message in the worst case.

    `one` and `many` are the wildcards for one level and for any number of levels. Each wildcard for one
    level, except the first, adds as many steps as the pattern has levels, because the search branches there.
    A pattern with `many` before its last level adds some steps for each level.
    """
    if many in pattern[:-1]:
        return STATE_STEPS * (len(pattern) + 1)
    ones = pattern.count(one)
    return (ones - 1) * len(pattern) if ones > 1 else 0


def filter_steps(topic_filter: str) -> int:
    """Return the steps that a subscription to this MQTT topic filter adds.

    A shared subscription also counts as one more member of its group.
    """
    members = MEMBER_STEPS if topic_filter.startswith(SHARED_PREFIX) else 0
    if topic_filter.count("+") < 2:
        return members
    return members + pattern_steps(topic_filter.split("/"), "+", "#")
