"""Logs, traces and metrics of a service. Emitted by the shell, never by code that is replayed.

Logs: structlog, JSON or console, with demand, epoch and node in every line. Traces: OpenTelemetry; the
context travels in each event's `traceparent`, so that one demand is one trace across services. Without
an exporter nothing is recorded, and the context is passed on all the same.
"""

from __future__ import annotations

import logging
import os
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import structlog
from opentelemetry import metrics, trace
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

if TYPE_CHECKING:
    from collections.abc import Generator, MutableMapping

__all__ = ["Telemetry", "configure_logging", "configure_tracing", "new_traceparent"]

# Keys that stand in every line, so that one search finds the story of a demand.
_EVERY_LINE: Final = ("demand", "epoch", "node")
_propagator: Final = TraceContextTextMapPropagator()
# A log line must not carry a secret: values of keys that contain one of these words are masked.
_SECRET: Final = ("password", "token", "secret", "credential", "authorization", "nkey", "jwt")


def _fill(_: object, __: str, line: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    for key in _EVERY_LINE:
        line.setdefault(key, None)
    return line


def _drop_empty(_: object, __: str, line: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    for key in _EVERY_LINE:
        if line.get(key, "") is None:
            del line[key]
    return line


def _mask(_: object, __: str, line: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    for key in line:
        if any(word in key.lower() for word in _SECRET):
            line[key] = "***"
    return line


def configure_logging(service: str, *, form: str = "auto", level: str = "info") -> None:
    """One line per happening on standard error. `form`: json, console, or auto (console on a terminal).

    Raises ValueError for an unknown form or level.
    """
    if form not in ("json", "console", "auto"):
        raise ValueError(f"log form {form!r}: expected json, console or auto")
    number = logging.getLevelNamesMapping().get(level.upper())
    if number is None:
        raise ValueError(f"log level {level!r}: expected debug, info, warning or error")
    console = form == "console" or (form == "auto" and sys.stderr.isatty())
    last: list[Any] = (
        [_drop_empty, structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())]
        if console
        else [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            _mask,
            _fill,
            *last,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.clear_contextvars()
    structlog.contextvars.bind_contextvars(service=service)


def configure_tracing(service: str) -> None:
    """Set up exporters when the environment asks for them; else spans stay unrecorded.

    `OTEL_EXPORTER_OTLP_ENDPOINT` with the package opentelemetry-exporter-otlp-proto-http installed, or
    `RIGBOOK_TRACES=console`.
    """
    wanted = os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT"), os.environ.get("RIGBOOK_TRACES")
    if not any(wanted):
        return
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter, SimpleSpanProcessor

    provider = TracerProvider(resource=Resource.create({"service.name": f"rigbook-{service}"}))
    if wanted[1] == "console":
        provider.add_span_processor(SimpleSpanProcessor(ConsoleSpanExporter(out=sys.stderr)))
    if wanted[0]:
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import (  # pyright: ignore[reportMissingImports]
                OTLPSpanExporter,
            )
        except ImportError:
            structlog.get_logger().warning(
                "traces are not exported", why="opentelemetry-exporter-otlp-proto-http is not installed"
            )
        else:
            provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(provider)


def new_traceparent(trace_id: str, span_id: str) -> str:
    """W3C Trace Context, version 00, sampled. 32 and 16 hexadecimal digits."""
    return f"00-{trace_id}-{span_id}-01"


class Telemetry:
    """One service's tracer and meter."""

    def __init__(
        self,
        service: str,
        *,
        tracers: trace.TracerProvider | None = None,
        meters: metrics.MeterProvider | None = None,
    ) -> None:
        self._tracer = trace.get_tracer(f"rigbook.{service}", tracer_provider=tracers)
        meter = metrics.get_meter(f"rigbook.{service}", meter_provider=meters)
        self.folded = meter.create_counter("rigbook.events.folded", "1", "events folded")
        self.appends = meter.create_counter("rigbook.appends", "1", "appends by kind and outcome")
        self.unknowns = meter.create_counter(
            "rigbook.unknowns", "1", "answers that could not be had, by source"
        )
        self.findings = meter.create_counter("rigbook.findings", "1", "findings by code")
        self.seconds = meter.create_histogram(
            "rigbook.step.duration", "s", "time of a step of the service's loop"
        )
        self.gauge = meter.create_up_down_counter("rigbook.held", "1", "things held, by name")
        self.skew = meter.create_gauge(
            "rigbook.clock.skew", "s", "a node's clock minus the server's, by node"
        )

    @contextmanager
    def span(self, name: str, parent: str = "", **attributes: str | float | bool) -> Generator[str]:
        """A span under `parent` (a traceparent); yields the traceparent that an event must carry."""
        context = _propagator.extract({"traceparent": parent}) if parent else None
        with self._tracer.start_as_current_span(name, context=context, attributes=attributes) as current:
            carrier: dict[str, str] = {}
            if current.is_recording():
                _propagator.inject(carrier)
            yield carrier.get("traceparent", parent)
