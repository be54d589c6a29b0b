"""Logging: one line per event on standard error, JSON or text, without prompts or credentials.

Verbosity is the reference's: 0 errors, 1 warnings, 2 what an operator wants to know (default), 3
one line per request, 4 every decision with its terms, 5 everything. What a request's fields may
hold is decided where they are logged: bodies and header values never are."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime

VERBOSE = 15
"""Between INFO and DEBUG: one line per request."""
TRACE = 5

_LEVELS = {0: logging.ERROR, 1: logging.WARNING, 2: logging.INFO, 3: VERBOSE, 4: logging.DEBUG}


def configure(*, verbosity: int, form: str) -> None:
    """Set up the process's logging.

    Args:
        verbosity: `--v`; above 4 is 5, below 0 is 0.
        form: `json` or `text`.
    """
    logging.addLevelName(VERBOSE, "VERBOSE")
    logging.addLevelName(TRACE, "TRACE")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    level = _LEVELS.get(max(0, verbosity), TRACE)
    logging.basicConfig(level=level, handlers=[handler], force=True)
    # Libraries speak only when something is wrong.
    for name in ("asyncio", "aiohttp", "grpc"):
        logging.getLogger(name).setLevel(max(level, logging.WARNING))


def fields_of(record: logging.LogRecord) -> dict[str, object]:
    """What was passed as `extra={"fields": {...}}`."""
    fields = getattr(record, "fields", None)
    return fields if isinstance(fields, dict) else {}


def _time(record: logging.LogRecord) -> str:
    at = datetime.fromtimestamp(record.created, UTC)
    return at.isoformat(timespec="milliseconds").replace("+00:00", "Z")


class JsonFormatter(logging.Formatter):
    """One JSON object per line: time, level, logger, message, the record's fields, traceback."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **fields_of(record),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        # Not msgspec: a lone surrogate in a client's text must not break the log.
        return json.dumps(line, default=str)


class TextFormatter(logging.Formatter):
    """The same for people: time, level, message, key=value. What would begin a new line or move the
    cursor is escaped, since model names come from clients and error texts from engines."""

    def format(self, record: logging.LogRecord) -> str:
        fields = "".join(f" {key}={value}" for key, value in fields_of(record).items())
        said = f"{record.getMessage()}{fields}"
        if not said.isprintable():
            said = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in said)
        text = f"{_time(record)} {record.levelname:<7} {said}"
        if record.exc_info:
            text = f"{text}\n{self.formatException(record.exc_info)}"
        return text
