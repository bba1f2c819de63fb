"""Whole catalogs and everything that checking says about them.

A case is a text file: a sentence, then files between `-- name --` lines, the last of which is the
expected output. `applied.yaml` is the catalog that was applied before, if there is one.
`UPDATE_CASES=1 pytest tests/catalog/test_cases.py` writes what is printed now; read the difference
before committing it.
"""

import asyncio
import os
import re
from pathlib import Path

import pytest

from penstock.catalog import desired
from penstock.catalog.build import BuildResult, build_catalog, load_catalog
from penstock.catalog.evolution import fits_stored
from penstock.connectors.builtin import BUILTIN
from penstock.consensus.open import open_consensus

CASES = sorted((Path(__file__).parent / "cases").glob("*.txt"))
SOURCES = Path(__file__).parents[2] / "src" / "penstock"
OUTPUT = "output"


def parts(case: str) -> tuple[str, dict[str, str]]:
    """The sentence at the head of a case, and its files by name."""
    head, *rest = re.split(r"^-- (.+) --\n", case, flags=re.MULTILINE)
    return head, dict(zip(rest[::2], rest[1::2], strict=True))


async def refusal(applied: Path, outcome: BuildResult) -> str:
    """Why a catalog cannot replace the one applied before."""
    store = await open_consensus("memory:")
    try:
        await desired.apply(store, load_catalog([applied], environ={}))
        check = fits_stored(store, outcome.collections)
        with pytest.raises(desired.ChangeRefused) as refused:
            await desired.apply(store, outcome.catalog, check=check)
        return f"{refused.value.what}\n"
    finally:
        await store.close()


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

    outcome = build_catalog(
        [Path("catalog.yaml")], environ={"SET": "secret value"}, connectors=BUILTIN
    )

    printed = "".join(d.render() + "\n" for d in outcome.diagnostics)
    if (applied := Path("applied.yaml")).exists():
        printed += asyncio.run(refusal(applied, outcome))
    if os.environ.get("UPDATE_CASES"):
        kept = text.split(f"-- {OUTPUT} --\n")[0]
        case.write_text(f"{kept}-- {OUTPUT} --\n{printed}", encoding="utf-8")
        return
    assert printed == expected
    errors = re.findall(r"\[E-[A-Z-]+\]$", expected, flags=re.MULTILINE)
    assert outcome.ok == (not errors) or applied.exists()


def test_every_code_has_a_case() -> None:
    shown = {
        c for case in CASES for c in re.findall(r"\[([EW]-[A-Z-]+)\]$", case.read_text(), re.M)
    }
    modules = [*(SOURCES / "catalog").glob("*.py")]
    named = ("schema_check.py", "columns.py", "config_schema.py")
    modules += [SOURCES / "model" / name for name in named]
    written = {c for m in modules for c in re.findall(r'"([EW]-[A-Z-]+)"', m.read_text())}
    assert written - shown == {"W-WIDE"}, "W-WIDE takes 2000 columns: see test_build"
