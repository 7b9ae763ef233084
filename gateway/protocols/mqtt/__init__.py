"""MQTT 5.0, 3.1.1, 3.1 and the little-endian level 2 as pure functions of octets: no I/O, no clock, no Trio.

Ingress drives a ServerConnection, a link drives a ClientConnection; `codec` and `translate` serve both.
"""
