"""MQTT 5.0, 3.1.1, 3.1 and the little-endian level 2 as pure functions of bytes.

The package does no input or output, reads no clock and does not use Trio. The listener drives a
ServerConnection and a link drives a ClientConnection. `codec`, `writers` and `translate` serve both.
"""
