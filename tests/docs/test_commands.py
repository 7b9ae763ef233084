"""What a stranger is told to type does what the page says: the README's and the tutorials' commands are run.

The blocks of a page are gone through in their order. Files are written as they stand, commands run in a shell
in a folder of the reader's; only ports and hosts are those of this test's gateway. What is shown below a
command is what it has to print, and a block without a language what the last one that goes on has printed.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from tests.adversary.arena import Arena
from tests.docs.pages import PAGES, ROOT
from tests.interop.gateway_fixture import LOOPBACK
from tests.interop.gateway_process import environment
from tests.interop.servers import program

PATIENCE_SECS: Final = 120.0
PORTS: Final = {1883: "mqtt", 5672: "amqp091", 3018: "amqpfast"}
GOES_ON: Final = re.compile(r"^gateway subscribe (?!.*--count)|^python consume\.py|&$")
OPERATORS: Final = re.compile(r"gateway (clients|sessions|queues|retained|deadletters|tokens) ")
CLIENTS: Final = ("mosquitto_pub", "mosquitto_sub", "mosquitto_rr", "amqp-publish")


class Reader:
    """Somebody who has a gateway, a folder and terminals."""

    patience_secs = PATIENCE_SECS  # for a command that ends

    def __init__(self, folder: Path, arenas: ExitStack) -> None:
        self.folder = folder
        self._arenas = arenas
        self._arena: Arena | None = None
        self._going_on: list[tuple[subprocess.Popen[bytes], Path]] = []
        folder.mkdir()

    def run_gateway(self, line: str) -> None:
        """`make run`, or `gateway run` with a file."""
        more: dict[str, Any] = {}
        if file := re.search(r"--config (\S+)", line):
            told = yaml.safe_load((self.folder / file[1]).read_text())
            more = {word: told[word] for word in ("declare",) if word in told}
            more["mappings"] = [str(self.folder / name) for name in told.get("mappings", ())]
        place = self.folder.parent / f"gateway{len(list(self.folder.parent.iterdir()))}"
        self._arena = self._arenas.enter_context(Arena(place, **more))

    @property
    def arena(self) -> Arena:
        assert self._arena is not None, "the page has not said yet how to start a gateway"
        return self._arena

    def local(self, text: str) -> str:
        """With this gateway's ports."""
        if self._arena is None:
            return text
        for port, listener in PORTS.items():
            text = text.replace(f"localhost:{port}", f"{LOOPBACK}:{self.arena.port(listener)}")
        if OPERATORS.match(text):
            text += f" --url http://{LOOPBACK}:{self.arena.port('http')}"
        return re.sub(r"\b(mosquitto_(?:[ps]ub|rr))", rf"\1 -h {LOOPBACK} -p {self.arena.port('mqtt')}", text)

    def write(self, text: str) -> None:
        """A file, named by the comment that it begins with."""
        if named := re.match(r"# (\S+\.(?:py|yaml))\b", text):
            (self.folder / named[1]).write_text(self.local(text) if named[1].endswith(".py") else text)

    def type(self, line: str, expected: list[str]) -> None:
        """A command, in a terminal of its own if it goes on."""
        if line.startswith(("make run", "gateway run")):
            self.run_gateway(line)
        elif GOES_ON.search(line):
            self._start(line.removesuffix("&"))
        else:
            done = subprocess.run(
                self.local(line),
                shell=True,
                cwd=self.folder,
                env=self._environment(),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=self.patience_secs,
                check=False,
            )
            printed = done.stdout.replace(f"{ROOT}/", "").splitlines()
            if expected and not printed and self._going_on:
                self.heard("\n".join(expected))  # by what goes on in the same terminal
                return
            refused = bool(expected) and expected[0].startswith("not ")
            assert done.returncode == refused, done.stdout
            if expected and expected[-1].strip() == "…":  # and so on
                printed[len(expected) - 1 :] = expected[-1:]
            if expected:
                assert printed == expected

    def heard(self, expected: str) -> None:
        """The last that goes on has printed this."""
        _, output = self._going_on[-1]
        deadline = time.monotonic() + PATIENCE_SECS
        while output.read_text().strip() != expected.strip():
            assert time.monotonic() < deadline, output.read_text()
            time.sleep(0.02)

    def _start(self, line: str) -> None:
        before = self._listening()
        output = self.folder / f"output{len(self._going_on)}"
        with output.open("wb") as file:
            process = subprocess.Popen(
                f"exec {self.local(line)}", shell=True, cwd=self.folder, env=self._environment(), stdout=file
            )
        self._going_on.append((process, output))
        deadline = time.monotonic() + PATIENCE_SECS
        while self._listening() == before:  # what is published before would not reach it
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.02)

    def _listening(self) -> float:
        return self.arena.counted("gateway_consumers") + self.arena.counted("gateway_subscriptions")

    def _environment(self) -> dict[str, str]:
        path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
        ours = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        return environment() | {"PATH": path, "PYTHONPATH": ours, "PYTHONUNBUFFERED": "1"}

    def leave(self) -> None:
        """Close the terminals."""
        for process, _ in self._going_on:
            process.kill()
            process.wait()


@contextmanager
def reading(folder: Path) -> Iterator[Reader]:
    with ExitStack() as arenas:
        reader = Reader(folder / "reader", arenas)
        try:
            yield reader
        finally:
            reader.leave()


def follow(reader: Reader, blocks: list[tuple[str, str]]) -> int:
    """Do as a page says; returns how many commands it has."""
    count = 0
    for kind, text in blocks:
        if kind in ("python", "yaml"):
            reader.write(text)
        elif kind == "console":
            for command in re.findall(r"^\$ (.*\n(?:(?!\$ ).*\n)*)", text, re.MULTILINE):
                line, *expected = command.splitlines()
                reader.type(line, expected)
                count += 1
        elif not kind and count:
            reader.heard(text)
    return count


PAGES_FOLLOWED: Final = {
    "README.md": 6,
    "docs/tutorials/first-message.md": 9,
    "docs/tutorials/first-mapping.md": 8,
    "docs/guides/mapping-recipes.md": 2,
    "docs/guides/declaring.md": 5,
    "docs/guides/operating.md": 6,
    "docs/guides/request-reply.md": 3,
}
"""How many commands each has."""


@pytest.mark.parametrize("name, count", PAGES_FOLLOWED.items())
def test_a_page_can_be_followed(name: str, count: int, tmp_path: Path) -> None:
    for client in CLIENTS:
        program(client)
    page = PAGES[ROOT / name]
    with reading(tmp_path) as reader:
        assert follow(reader, page.blocks) == count
