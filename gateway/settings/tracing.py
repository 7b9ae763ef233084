"""Traces by OpenTelemetry: which messages are traced, and where the spans go."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Final, Self

from pydantic import Field, field_serializer, model_validator

from gateway.settings.endpoints import masked_url
from gateway.settings.limits import Section

NEEDS: Final = ("opentelemetry", "opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")
"""Packages of the extra `otel`, outer ones first."""


class Tracing(Section):
    """Spans of messages, sent by OTLP over HTTP. Needs the extra `otel`."""

    enabled: bool = False
    """Off: nothing is traced, what messages carry of a trace passes as it is, and none of this costs
    anything."""
    url: str | None = Field(None, pattern=r"^https?://")
    """Where spans go, as `http://collector:4318/v1/traces`; absent: where OpenTelemetry's own variables say
    (`OTEL_EXPORTER_OTLP_ENDPOINT`, `..._HEADERS`, `..._CERTIFICATE`), else port 4318 of this machine."""
    share: float = Field(0.001, ge=0, le=1)
    """Of the messages that come without a `traceparent`: so many of all begin a trace. One that comes with
    it is traced if it says that it is sampled."""
    messages_per_second_max: float = Field(100.0, gt=0)
    """Traced messages, whatever their senders ask for; those beyond pass as if nobody had asked."""
    service: str = Field("gateway", min_length=1, max_length=200)
    """`service.name` of all spans; their `service.instance.id` is `replica`."""

    @field_serializer("url")
    def _hidden(self, url: str | None) -> str | None:
        return None if url is None else masked_url(url)

    @model_validator(mode="after")
    def _installed(self) -> Self:
        if self.enabled and not all(find_spec(name) for name in NEEDS):
            raise ValueError("needs OpenTelemetry, which is not installed: pip install 'gateway[otel]'")
        return self
