"""How a paho client of a test ends."""

from __future__ import annotations

import paho.mqtt.client as paho


def leave(client: paho.Client) -> None:
    """Say goodbye, end its thread, and close what it would leave to the garbage collector: that may come in
    the midst of another test, with a warning that a socket was not closed.
    """
    client.disconnect()
    client.loop_stop()
    client._reset_sockets()
