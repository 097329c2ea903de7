"""Logs: events with fields on stderr, as text for a terminal and as JSON lines for everything else."""

import logging
import sys

import structlog


def configure(role: str, name: str, *, debug: bool = False) -> None:
    """Set up this process's logs, once; every event carries role and name."""
    level = logging.DEBUG if debug else logging.INFO
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="%(name)s: %(message)s")
    rendering: list[structlog.typing.Processor] = (
        [structlog.dev.ConsoleRenderer()]
        if sys.stderr.isatty()
        else [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(default=str)]
    )

    def sign(_logger: object, _method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
        return {"role": role, "name": name, **event}  # not a context variable: threads log as well

    structlog.configure(
        processors=[
            sign,
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            *rendering,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
