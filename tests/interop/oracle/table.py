"""The tables of docs/conformance/amqp-0-9-1.md, from the scripts: `python -m tests.interop.oracle.table`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from itertools import groupby

from gateway.protocols.amqp091 import methods as m
from gateway.protocols.amqp091.spec import ReplyCode
from tests.interop.gateway_fixture import running
from tests.interop.oracle.scripts import run_all
from tests.interop.oracle.suite import DIFFERENT
from tests.interop.oracle.wire import SAID, Log


def methods_table(logs: dict[str, Log]) -> Iterator[str]:
    """Every method, and how many scripts say it or hear it."""
    heard: dict[str, set[str]] = {}
    for name, log in logs.items():
        for one in log:
            heard.setdefault(one.name, set()).add(name)
    yield "| class | methods from clients | methods to clients |"
    yield "|---|---|---|"
    classes: dict[str, tuple[list[str], list[str]]] = {}
    for method in m.METHODS.values():
        group, name = method.name.split(".", 1)
        said, told = classes.setdefault(group, ([], []))
        if method.name in SAID and method.direction & m.TO_SERVER:
            said.append(name)
        if method.name in heard:
            told.append(name)
    for group, (said, told) in classes.items():
        yield f"| {group} | {', '.join(said)} | {', '.join(told)} |"


def errors_table(logs: dict[str, Log]) -> Iterator[str]:
    """What a client does, and the close that it gets, by code and method."""
    yield "| code | closes | method at fault | what a client did |"
    yield "|---|---|---|---|"
    rows: dict[tuple[int, str, str], list[str]] = {}
    for name, log in logs.items():
        closes = [one for one in log if one.name.endswith(".close")]
        mark = " ¹" if name in DIFFERENT else ""
        if closes:
            code, _, class_id, method_id = closes[0].said
            kind = m.METHODS.get(class_id << 16 | method_id)
            fault = kind.name if kind is not None else f"{class_id}.{method_id}" if class_id else "none"
            row = (code, closes[0].name.split(".")[0], fault)
        elif log[-1].name == "end" and log[-1].who == "a":
            row = (0, "the socket", "none")
        else:
            continue
        rows.setdefault(row, []).append(name + mark)
    for (code, what, fault), names in sorted(rows.items()):
        word = f"{code} {ReplyCode(code).name.lower().replace('_', '-')}" if code else "none"
        yield f"| {word} | {what} | {fault} | {'; '.join(_grouped(sorted(names)))} |"
    yield ""
    for name, difference in DIFFERENT.items():
        yield f"¹ {name}: {difference.why}."


def _grouped(names: list[str]) -> Iterator[str]:
    """Return sorted names, of which neighbours with the same words up to "with" are joined."""
    for begin, group in groupby(names, lambda name: name.rpartition(" with ")[0]):
        found = list(group)
        if begin:
            yield f"{begin} with {', '.join(name.removeprefix(f'{begin} with ') for name in found)}"
        else:
            yield from found


def count_line(logs: dict[str, Log]) -> str:
    """How many scripts there are, and how many find a difference."""
    alike = len(logs) - len(DIFFERENT)
    said = "scripts get the same methods, codes and order from RabbitMQ 3.10 and the gateway."
    return f"{alike} of {len(logs)} {said}"


def main() -> None:
    """Run the scripts against a gateway, and print; its log goes to standard error."""
    with redirect_stdout(sys.stderr), running() as gateway:
        logs = run_all(gateway.amqp)
    print(count_line(logs), *methods_table(logs), "", *errors_table(logs), sep="\n")


if __name__ == "__main__":
    main()
