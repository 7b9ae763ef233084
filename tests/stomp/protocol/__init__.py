"""STOMP 1.2 as pure functions of bytes."""
