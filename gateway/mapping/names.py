"""Translation of the levels of a name from one protocol to another, so that it can be reversed.

A name is a list of levels: `plant/v1.2/t` in MQTT has the levels `plant`, `v1.2`, `t`. Each protocol has
characters that a level cannot hold (`forbidden`: they would split the name, or the protocol refuses them)
and characters that a level should not hold (`guarded`: consumers take them for wildcards). For the policy
`percent` the translation of levels from protocol A to B is a bijection, so that each name, also one that
holds `%2E` literally, is the same after translation there and back. Per character, with `%XX` its code and
`%25XX`, `%2525XX` that code nested:

- forbidden in B only: one nesting more (`.` -> `%2E` -> `%252E`);
- forbidden in A only: one nesting less, the inverse (`%2E` -> `.`);
- guarded in exactly one of the two, forbidden in neither: the bare character and `%XX` are swapped;
- everything else, every other `%` included, is unchanged.

A source that breaks its own rule (an old AMQP/Fast destination with a `/`) loses the bijection, never the
levels: a character that is forbidden in B is encoded even if it is forbidden in A.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import Literal

from gateway.model.dialect import Dialect, NameRefused, quote_short

Escape = Literal["percent", "swap", "keep", "reject"]
LevelTranslation = Callable[[str], str]


def split_levels(text: str, separator: str) -> list[str]:
    """Split a pattern or template at `separator`, but not inside braces: `{a...}.b` has two levels."""
    if not text:
        return []
    return re.split(re.escape(separator) + r"(?![^{}]*\})", text)


@cache
def translation(source: Dialect, target: Dialect, escape: Escape) -> LevelTranslation:
    """Return the function that translates one level of a name from the protocol `source` to `target`.

    `escape` is the policy for characters that are special in one of the two protocols. `keep` copies the
    level. `swap` exchanges the separators of the two protocols. `percent` percent-encodes special characters
    reversibly, as the docstring of this module explains. `reject` refuses a level that `percent` would have
    to encode. The function may raise NameRefused.
    """
    if escape == "keep":
        return _unchanged
    if escape == "swap":
        one, other = source.separator, target.separator
        table = {ord(one): other, ord(other): one}
        return _unchanged if one == other else lambda level: level.translate(table)
    more, fewer, swapped = _classes(source, target)
    if escape == "reject":
        return _refusal("".join(sorted(more | swapped)))
    return _percent(set(target.forbidden), more, fewer, swapped) if more | fewer | swapped else _unchanged


@cache
def plain_translation(target: Dialect, escape: Escape) -> LevelTranslation:
    """Return the function that encodes a text, such as a client id, as one level of a name in `target`.

    `target` is a protocol. In contrast to `translation`, the text does not come from a name of another
    protocol. The function may raise NameRefused. `escape` is as in `translation`.
    """
    if escape in ("keep", "swap"):
        return _unchanged
    if escape == "reject":
        return _refusal(target.wild)
    return _percent(set(), set(target.wild), set(), set())


def _unchanged(level: str) -> str:
    return level


def _classes(source: Dialect, target: Dialect) -> tuple[set[str], set[str], set[str]]:
    """Return three sets of characters that the policy `percent` translates.

    Those in the first set are percent-encoded once more, those in the second set are decoded once. For those
    in the third set, the bare and the encoded form are exchanged. All sets are empty if names need no
    translation.
    """
    forbidden_here, forbidden_there = set(source.forbidden), set(target.forbidden)
    swapped = (set(source.guarded) ^ set(target.guarded)) - forbidden_here - forbidden_there
    return forbidden_there - forbidden_here, forbidden_here - forbidden_there, swapped


def _refusal(characters: str) -> LevelTranslation:
    """Return a function that returns a level unchanged, or raises NameRefused.

    NameRefused is raised if the level contains one of `characters`.
    """

    def refuse(level: str) -> str:
        for character in characters:
            if character in level:
                raise NameRefused(
                    f"{quote_short(level)} contains {character!r}, and the route has escape: reject"
                )
        return level

    return refuse


def _percent(forbidden: set[str], more: set[str], fewer: set[str], swapped: set[str]) -> LevelTranslation:
    bare = "".join(map(re.escape, sorted(forbidden | more | swapped)))
    codes = "|".join(f"{ord(character):02X}" for character in sorted(more | fewer | swapped))
    return Percent(re.compile(f"[{bare}]|%(?:25)*(?:{codes})"), more, fewer)


class Percent:
    """Function that translates one level of a name by the policy `percent`.

    The regular expression `search` matches each part of a level that changes: a character, or its
    percent-encoded form. Characters in `more` are percent-encoded once more, those in `fewer` are decoded
    once. For all other characters that `search` matches, the bare and the encoded form are exchanged.
    """

    __slots__ = ("_fewer", "_more", "search")

    def __init__(self, search: re.Pattern[str], more: set[str], fewer: set[str]) -> None:
        self.search = search
        self._more = more
        self._fewer = fewer

    def __call__(self, level: str) -> str:
        """Translate one level of a name."""
        return self.search.sub(self._rewrite, level)

    def _rewrite(self, found: re.Match[str]) -> str:
        """Return the translation of one character, bare or percent-encoded, that `search` has found."""
        token = found[0]
        if len(token) == 1:
            return f"%{ord(token):02X}"
        character = chr(int(token[-2:], 16))
        nested = len(token) > 3
        if character in self._more:
            return "%25" + token[1:]
        if character in self._fewer:
            return "%" + token[3:] if nested else character
        return token if nested else character


def changes(translate: LevelTranslation) -> Callable[[str], object]:
    """Return a fast test which tells, for a whole name, if `translate` may change one of its levels.

    If the test returns a false value, no level changes; if it returns a true value, levels may change.
    """
    if translate is _unchanged:
        return _always_false
    return translate.search.search if isinstance(translate, Percent) else _always


def _always_false(name: str) -> bool:
    return False


def _always(name: str) -> bool:
    return True
