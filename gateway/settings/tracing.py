"""Section `tracing` of the configuration: traces by OpenTelemetry.

The section selects the messages to trace and the collector to which traces are sent. It needs the extra
`otel`, and its absence is a configuration error.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Final, Self

from pydantic import Field, model_validator

from gateway.settings.endpoints import MaskedUrl
from gateway.settings.limits import Section

NEEDS: Final = ("opentelemetry", "opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")
"""Packages of the extra `otel`, outer ones first."""


class TracingSettings(Section):
    """Tracing of messages. Spans are sent by OTLP over HTTP.

    Tracing needs the extra `otel`.
    """

    enabled: bool = False
    """True if messages are traced. Otherwise trace headers of messages pass unchanged, and tracing costs
    nothing."""
    url: MaskedUrl | None = Field(None, pattern=r"^https?://")
    """URL of the collector, such as `http://collector:4318/v1/traces`. Absent: the URL in OpenTelemetry's own
    variables (`OTEL_EXPORTER_OTLP_ENDPOINT`, `..._HEADERS`, `..._CERTIFICATE`), else port 4318 of this
    machine."""
    share: float = Field(0.001, ge=0, le=1)
    """Fraction of messages without a `traceparent` that begin a trace. A message with one is traced if its
    flag says that it is sampled."""
    messages_per_second_max: float = Field(100.0, gt=0)
    """Traced messages per second, whatever senders request; further messages pass untraced."""
    service: str = Field("gateway", min_length=1, max_length=200)
    """`service.name` of all spans; `service.instance.id` is `replica`."""

    @model_validator(mode="after")
    def _installed(self) -> Self:
        if self.enabled and not all(find_spec(name) for name in NEEDS):
            raise ValueError("needs OpenTelemetry, which is not installed: pip install 'gateway[otel]'")
        return self
