"""Dead letters: messages that no route, limit or target accepted.

They are stored with the reason (letters.py), copied to an address (forwarder.py) and published again on
request (redrive.py).
"""

from gateway.broker.dead_letters.letters import DeadLetters, Letter

__all__ = ["DeadLetters", "Letter"]
