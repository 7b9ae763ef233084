"""The levels of a name, and how a level is written in another protocol so that it can be read back.

A name is a list of levels: `plant/v1.2/t` in MQTT has the levels `plant`, `v1.2`, `t`. Each protocol has
characters that a level cannot hold (`forbidden`: they would split the name, or the protocol refuses them)
and characters that it had better not hold (`guarded`: consumers take them for wildcards). For the policy
`percent` the translation of levels from protocol A to B is a bijection, so that each name, also one that
holds `%2E` literally, comes back as it went. Per character, with `%XX` its code and `%25XX`, `%2525XX` that
code nested:

- forbidden in B only: one nesting more (`.` -> `%2E` -> `%252E`);
- forbidden in A only: one nesting less, the inverse (`%2E` -> `.`);
- guarded in exactly one of the two, forbidden in neither: the bare character and `%XX` change places;
- everything else, every other `%` included, stays as it is.

A source that breaks its own rule (an old AMQP/Fast destination with a `/`) loses the bijection, never the
levels: what is forbidden in B is encoded wherever it comes from.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Literal

from gateway.model.dialect import Dialect, NameRefused, short

Escape = Literal["percent", "swap", "keep", "reject"]
LevelTranslation = Callable[[str], str]


def split_levels(text: str, separator: str) -> list[str]:
    """Split a pattern or template at `separator`, but not inside braces: `{a...}.b` has two levels."""
    if not text:
        return []
    return re.split(re.escape(separator) + r"(?![^{}]*\})", text)


def translation(source: Dialect, target: Dialect, escape: Escape) -> LevelTranslation:
    """How one level of a name in `source` is written in `target`. The result may raise NameRefused.

    `keep` copies; `swap` exchanges the two separators; `reject` refuses what `percent` would have to encode;
    `percent` is the bijection described at the head of this file.
    """
    if escape == "keep":
        return _keep
    if escape == "swap":
        one, other = source.separator, target.separator
        table = {ord(one): other, ord(other): one}
        return _keep if one == other else lambda level: level.translate(table)
    more, fewer, swapped = _classes(source, target)
    if escape == "reject":
        return _refusal("".join(sorted(more | swapped)))
    return _percent(set(target.forbidden), more, fewer, swapped) if more | fewer | swapped else _keep


def plain_translation(target: Dialect, escape: Escape) -> LevelTranslation:
    """How text that is no name (a client id, an exchange) is written as one level of a name in `target`."""
    if escape in ("keep", "swap"):
        return _keep
    if escape == "reject":
        return _refusal(target.wild)
    return _percent(set(), set(target.wild), set(), set())


def _keep(level: str) -> str:
    return level


def _classes(source: Dialect, target: Dialect) -> tuple[set[str], set[str], set[str]]:
    """The characters that gain a nesting, that lose one, and whose first two forms change places.

    Empty when source and target agree: then every name is already as it must be.
    """
    forbidden_here, forbidden_there = set(source.forbidden), set(target.forbidden)
    swapped = (set(source.guarded) ^ set(target.guarded)) - forbidden_here - forbidden_there
    return forbidden_there - forbidden_here, forbidden_here - forbidden_there, swapped


def _refusal(characters: str) -> LevelTranslation:
    def refuse(level: str) -> str:
        for character in characters:
            if character in level:
                raise NameRefused(f"{short(level)} holds {character!r}, and the route says escape: reject")
        return level

    return refuse


def _percent(forbidden: set[str], more: set[str], fewer: set[str], swapped: set[str]) -> LevelTranslation:
    bare = "".join(map(re.escape, sorted(forbidden | more | swapped)))
    codes = "|".join(f"{ord(character):02X}" for character in sorted(more | fewer | swapped))
    return Percent(re.compile(f"[{bare}]|%(?:25)*(?:{codes})"), more, fewer)


class Percent:
    """The bijection: `search` finds what of a level changes."""

    __slots__ = ("_fewer", "_more", "search")

    def __init__(self, search: re.Pattern[str], more: set[str], fewer: set[str]) -> None:
        self.search = search
        self._more = more
        self._fewer = fewer

    def __call__(self, level: str) -> str:
        return self.search.sub(self._rewrite, level)

    def _rewrite(self, found: re.Match[str]) -> str:
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
    """What says, for a whole name, whether the translation changes any of its levels; sometimes wrongly yes,
    never wrongly no. Its truth counts."""
    if translate is _keep:
        return _never
    return translate.search.search if isinstance(translate, Percent) else _always


def _never(name: str) -> bool:
    return False


def _always(name: str) -> bool:
    return True
