"""Parse durations: 90s, 5m, 1h30m, or a number of seconds."""

from __future__ import annotations

import re
from typing import Final

from penstock.errors import UsageError

_PARTS: Final = re.compile(r"(?:(\d+)h)?(?:(\d+)m(?!s))?(?:(\d+(?:\.\d+)?)s)?(?:(\d+)ms)?")


def seconds_of(text: str, option: str) -> float:
    """Return the seconds of a duration; `option` is where it was given."""
    written = text.strip().lower()
    try:
        seconds = float(written)
    except ValueError:
        found = _PARTS.fullmatch(written)
        if not written or found is None:
            raise UsageError(
                f"{text!r} is not a duration", where=option, fix="write 90s, 5m or 1h30m"
            ) from None
        hours, minutes, rest, millis = (float(part or 0) for part in found.groups())
        seconds = hours * 3600 + minutes * 60 + rest + millis / 1000
    if seconds <= 0:
        raise UsageError(f"{text!r} is not positive", where=option, fix="write 90s, 5m or 1h30m")
    return seconds
