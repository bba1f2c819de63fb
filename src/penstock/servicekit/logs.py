"""Log lines: an event, then its fields; for people as `event key=value`, for machines as JSON.

    log = logging.getLogger(__name__)
    log.info("consensus backend ready", extra=fields(url=url, incarnation=incarnation))

Secrets are masked in the formatter, once the whole text is there: code that logs a driver's
exception cannot know what the driver put into it.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import IO, Any

from penstock.servicekit.secrets import REDACTED, mask, sounds_secret

_PLAIN = re.compile(r"[^\s\"=]+")


def fields(**values: object) -> dict[str, dict[str, object]]:
    """Return the fields of an event for the `extra` of a logging call."""
    return {"fields": values}


class LineFormatter(logging.Formatter):
    """`2026-05-30T07:21:00.123Z INFO penstock.consensus: consensus backend ready url=…`"""

    def format(self, record: logging.LogRecord) -> str:
        line = f"{_time(record)} {record.levelname} {record.name}: {record.getMessage()}"
        for name, value in _fields(record).items():
            text = _scalar(value)
            line += f" {name}={text if _PLAIN.fullmatch(text) else json.dumps(text)}"
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return mask(line)


class JsonFormatter(logging.Formatter):
    """One JSON object per line; the fields beside `time`, `level`, `logger` and `event`."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, object] = {
            "time": _time(record),
            "level": record.levelname,
            "logger": record.name,
            "event": mask(record.getMessage()),
        }
        for name, value in _fields(record).items():
            if sounds_secret(name):
                entry[name] = REDACTED
            elif isinstance(value, bool | int | float) or value is None:
                entry[name] = value
            else:
                entry[name] = mask(_scalar(value))
        if record.exc_info:
            entry["exception"] = mask(self.formatException(record.exc_info))
        return json.dumps(entry, ensure_ascii=False)


def configure(*, level: str, as_json: bool = False, stream: IO[str] | None = None) -> None:
    """Send the logs of this process to `stream` (stderr by default); replaces what was configured.

    Libraries log from WARNING on, whatever our own level is.
    """
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter() if as_json else LineFormatter())
    root = logging.getLogger()
    for old in [h for h in root.handlers if isinstance(h.formatter, LineFormatter | JsonFormatter)]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    logging.getLogger("penstock").setLevel(level.upper())


def _fields(record: logging.LogRecord) -> Mapping[str, Any]:
    found = getattr(record, "fields", {})
    return found if isinstance(found, Mapping) else {}


def _scalar(value: object) -> str:
    match value:
        case float():
            return f"{value:.4g}"
        case bytes():
            return value.hex()
        case _:
            return str(value)


def _time(record: logging.LogRecord) -> str:
    moment = datetime.fromtimestamp(record.created, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
