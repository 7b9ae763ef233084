"""The second client, in a process of its own: how long the gateway takes to answer it, over and over.

    python -m tests.adversary.probe MQTT_PORT HTTP_PORT

It publishes a message of QoS 1 and asks for `/livez`, in turn, some two hundred times a second, until its
standard input closes. Then it writes one JSON object: the round trips in seconds, and what was not answered.
Nothing here is of the gateway's own code, and nothing is of the attacker's process: a stall that is measured
is the gateway's.
"""

from __future__ import annotations

import json
import select
import socket
import sys
import time
from typing import Final

PAUSE_SECS: Final = 0.005
PATIENCE_SECS: Final = 60.0
CONNECT: Final = b"\x10\x11\x00\x04MQTT\x04\x02\x00\x00\x00\x05probe"
PUBLISH: Final = b"\x32\x0b\x00\x05probe\x00\x01xx"
LIVEZ: Final = b"GET /livez HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
HTTP_EVERY: Final = 10  # rounds
ROUNDS_MIN: Final = 200  # also when the attack is over sooner


def mqtt(port: int) -> socket.socket:
    """A client that has been let in."""
    sock = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_SECS)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.sendall(CONNECT)
    answer = sock.recv(4)
    if answer[:1] != b"\x20" or answer[3:] != b"\x00":
        raise ConnectionError(f"CONNACK {answer!r}")
    return sock


def acknowledged(sock: socket.socket) -> None:
    """One message of QoS 1, and its PUBACK."""
    sock.sendall(PUBLISH)
    answer = b""
    while len(answer) < 4:
        data = sock.recv(4 - len(answer))
        if not data:
            raise ConnectionError("the gateway has closed the connection")
        answer += data


def lives(port: int) -> None:
    """`/livez` over a connection of its own."""
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_SECS) as sock:
        sock.sendall(LIVEZ)
        if not sock.recv(1_024).startswith(b"HTTP/1.1 200"):
            raise ConnectionError("/livez did not say 200")


def main() -> None:
    ports = [int(word) for word in sys.argv[1:3]]
    found: dict[str, list[float]] = {"mqtt": [], "http": []}
    failures: list[str] = []
    sock = mqtt(ports[0])
    print("ready", flush=True)
    turn = 0
    while turn < ROUNDS_MIN or not select.select([sys.stdin], [], [], 0)[0]:
        time.sleep(PAUSE_SECS)
        kind = "http" if turn % HTTP_EVERY == 0 and ports[1] else "mqtt"
        turn += 1
        begin = time.monotonic()
        try:
            if kind == "http":
                lives(ports[1])
            else:
                acknowledged(sock)
        except OSError as error:
            failures.append(f"{kind}: {error!r}")
            if kind == "mqtt":
                break
        found[kind].append(time.monotonic() - begin)
    print(json.dumps({"round_trips": found, "failures": failures}))


if __name__ == "__main__":
    main()
