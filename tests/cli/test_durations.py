"""Times as people write them."""

from __future__ import annotations

import pytest

from penstock.cli.durations import seconds_of
from penstock.errors import UsageError


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90s", 90),
        ("5m", 300),
        ("1h30m", 5400),
        ("1h", 3600),
        ("2m5s", 125),
        ("1.5s", 1.5),
        ("250ms", 0.25),
        ("45", 45),
        (" 10S ", 10),
    ],
)
def test_a_time_has_so_many_seconds(text: str, seconds: float) -> None:
    assert seconds_of(text, "--timeout") == seconds


@pytest.mark.parametrize("text", ["", "soon", "5 minutes", "s", "-3s", "0s", "0", "5m5"])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(UsageError) as refused:
        seconds_of(text, "--timeout")
    assert "--timeout" in str(refused.value)
