"""Dead letters: messages that nothing would take, kept with the reason, copied elsewhere, and tried again."""

from gateway.broker.dead_letters.letters import DeadLetters, Letter

__all__ = ["DeadLetters", "Letter"]
