"""PURE: results of tests for programs: JSON, and JUnit's XML, which CI systems read."""

from __future__ import annotations

import re
from collections.abc import Sequence
from xml.etree import ElementTree as Xml

from penstock.catalog.testing.run import PLAIN, Failure, Outcome
from penstock.model.json_order import Json

_NOT_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that XML cannot hold, not even escaped."""


def as_json(outcomes: Sequence[Outcome]) -> dict[str, Json]:
    """The results for --json."""
    failed = sum(outcome.failure is not None for outcome in outcomes)
    return {
        "ok": not failed,
        "tests": [_test(outcome) for outcome in outcomes],
        "summary": {"tests": len(outcomes), "passed": len(outcomes) - failed, "failed": failed},
    }


def as_junit(outcomes: Sequence[Outcome]) -> bytes:
    """The results as JUnit XML. A test whose documents differ *fails*; one that cannot run *errs*.

    The class of a test is its name up to the last slash.
    """
    failures = [outcome.failure for outcome in outcomes if outcome.failure is not None]
    errors = sum(failure.error is not None for failure in failures)
    counts = {
        "name": "penstock test",
        "tests": str(len(outcomes)),
        "failures": str(len(failures) - errors),
        "errors": str(errors),
        "skipped": "0",
        "time": _seconds(sum(outcome.seconds for outcome in outcomes)),
    }
    root = Xml.Element("testsuites", counts)
    suite = Xml.SubElement(root, "testsuite", counts)
    for outcome in outcomes:
        above, _, name = _xml(outcome.test.name).rpartition("/")
        case = Xml.SubElement(
            suite,
            "testcase",
            {"classname": above or "tests", "name": name, "time": _seconds(outcome.seconds)},
        )
        if (failure := outcome.failure) is not None:
            kind = "failure" if failure.error is None else "error"
            found = Xml.SubElement(case, kind, {"message": _xml(failure.what), "type": kind})
            found.text = _xml("\n".join(failure.lines()))
    Xml.indent(root)
    text: bytes = Xml.tostring(root, encoding="utf-8", xml_declaration=True)
    return text + b"\n"


def _test(outcome: Outcome) -> dict[str, Json]:
    return {
        "name": outcome.test.name,
        "description": outcome.test.description,
        "ok": outcome.failure is None,
        "seconds": round(outcome.seconds, 3),
        "runs": outcome.runs,
        "failure": None if outcome.failure is None else _failure(outcome.failure),
    }


def _failure(failure: Failure) -> dict[str, Json]:
    return {
        "step": failure.number,
        "at": failure.step.origin,
        "action": failure.step.action,
        "collection": failure.step.collection,
        "description": failure.step.description,
        "variant": None if failure.variant == PLAIN else str(failure.variant),
        "message": failure.what,
        "differences": [] if failure.comparison is None else [*failure.comparison.to_json()],
        "text": [*failure.lines()],
    }


def _seconds(seconds: float) -> str:
    return f"{seconds:.3f}"


def _xml(text: str) -> str:
    return _NOT_XML.sub("\ufffd", text)
