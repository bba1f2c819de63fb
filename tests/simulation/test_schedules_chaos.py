"""As many schedules as there is time for, from a seed that nobody has tried before."""

from __future__ import annotations

import os
import random
import time

import pytest

from support.schedules import Done, check

SECONDS = float(os.environ.get("PENSTOCK_CHAOS_SECONDS", "0"))

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(600 + SECONDS * 5)]


def test_no_schedule_fails_however_long_one_looks() -> None:
    first = random.SystemRandom().randrange(1 << 40)
    seed, done = first, Done()
    end = time.monotonic() + SECONDS
    while seed == first or time.monotonic() < end:
        done += check(range(seed, seed + 50))
        seed += 50
    assert done.documents > 0, f"{seed - first} schedules from {first} on did nothing"
