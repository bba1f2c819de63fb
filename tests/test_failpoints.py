from __future__ import annotations

import subprocess
import sys

import pytest

from penstock import failpoints
from penstock.errors import UsageError

_SCRIPT = """
from penstock import failpoints
failpoints.declare("a", "a test")
failpoints.arm({spec!r})
for i in range(3):
    print(i, flush=True)
    failpoints.hit("a")
"""


@pytest.mark.parametrize(
    ("spec", "printed", "code"),
    [
        pytest.param("a", "0\n", 137, id="the first hit by default"),
        pytest.param("a:3", "0\n1\n2\n", 137, id="the n-th hit"),
        pytest.param("b", "0\n1\n2\n", 0, id="another point"),
        pytest.param(None, "0\n1\n2\n", 0, id="none armed"),
    ],
)
def test_the_process_dies_at_the_armed_hit(spec: str | None, printed: str, code: int) -> None:
    script = _SCRIPT.format(spec=spec)
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert (run.stdout, run.returncode) == (printed, code)


@pytest.mark.parametrize("spec", ["a:0", "a:x", "a:-1"])
def test_a_count_that_is_none_is_a_usage_error(spec: str) -> None:
    with pytest.raises(UsageError, match="not a positive number"):
        failpoints.arm(spec)
