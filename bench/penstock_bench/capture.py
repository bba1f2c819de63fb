"""Captures: files, changes of PostgreSQL, and documents over HTTP."""

from __future__ import annotations

from penstock_bench import capture_cdc, capture_files, capture_http
from penstock_bench.frame import Bench, Report


def run(bench: Bench) -> Report:
    """Measure each source."""
    return Report.merge([capture_files.run(bench), capture_cdc.run(bench), capture_http.run(bench)])
