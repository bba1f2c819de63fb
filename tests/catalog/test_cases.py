"""Whole catalogs and everything that checking says about them.

A case is a text file: a sentence, then files between `-- name --` lines, the last of which is the
expected output. `UPDATE_CASES=1 pytest tests/catalog/test_cases.py` writes what is printed now;
read the difference before committing it.
"""

import os
import re
from pathlib import Path

import pytest

from penstock.catalog.build import build_catalog
from penstock.connectors.builtin import locate

CASES = sorted((Path(__file__).parent / "cases").glob("*.txt"))
SOURCES = Path(__file__).parents[2] / "src" / "penstock"
OUTPUT = "output"


def parts(case: str) -> tuple[str, dict[str, str]]:
    """The sentence at the head of a case, and its files by name."""
    head, *rest = re.split(r"^-- (.+) --\n", case, flags=re.MULTILINE)
    return head, dict(zip(rest[::2], rest[1::2], strict=True))


@pytest.mark.parametrize("case", CASES, ids=lambda path: path.stem)
def test_everything_that_is_wrong_is_said(
    case: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = case.read_text(encoding="utf-8")
    _, files = parts(text)
    expected = files.pop(OUTPUT, "")
    for name, content in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")
    monkeypatch.chdir(tmp_path)

    outcome = build_catalog([Path("catalog.yaml")], environ={"SET": "secret value"}, locate=locate)

    printed = "".join(d.render() + "\n" for d in outcome.diagnostics)
    if os.environ.get("UPDATE_CASES"):
        kept = text.split(f"-- {OUTPUT} --\n")[0]
        case.write_text(f"{kept}-- {OUTPUT} --\n{printed}", encoding="utf-8")
        return
    assert printed == expected
    errors = re.findall(r"\[E-[A-Z-]+\]$", expected, flags=re.MULTILINE)
    assert outcome.ok == (not errors)


def test_every_code_has_a_case() -> None:
    shown = {
        c for case in CASES for c in re.findall(r"\[([EW]-[A-Z-]+)\]$", case.read_text(), re.M)
    }
    modules = [*(SOURCES / "catalog").glob("*.py")]
    modules += [SOURCES / "model" / name for name in ("schema_check.py", "columns.py")]
    written = {c for m in modules for c in re.findall(r'"([EW]-[A-Z-]+)"', m.read_text())}
    assert written - shown == {"W-WIDE"}, "W-WIDE takes 2000 columns: see test_build"
