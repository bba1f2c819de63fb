"""Write the generated parts of all pages: `python -m penstock_docs`, or `make docs`.

With --check it writes nothing, and exits with 1 if a page is not up to date.
"""

from __future__ import annotations

import sys

from penstock_docs import catalog, checked, commands, connectors
from penstock_docs.pages import ROOT, Region, pages, rendered


def generate(region: Region) -> str:
    """Return what belongs into a region."""
    match region.what.split():
        case ["keys", "of", *_] | ["refused", "keys"]:
            return catalog.generate(region)
        case ["config" | "resource", "of", _]:
            return connectors.generate(region)
        case ["check"]:
            return checked.generate(region)
        case _:
            return commands.generate(region)


def main(arguments: list[str]) -> int:
    """Write the pages that changed, and say which. What cannot be generated is left as it is."""
    failed = []

    def attempt(region: Region) -> str:
        try:
            return generate(region)
        except (LookupError, RuntimeError) as error:
            failed.append(f"{region.place}: {error}")
            return region.body

    stale = {page: rendered(page, attempt) for page in pages()}
    stale = {page: text for page, text in stale.items() if text != page.read_text("utf-8")}
    for page, text in stale.items():
        sys.stdout.write(f"{page.relative_to(ROOT)}\n")
        if "--check" not in arguments:
            page.write_text(text, encoding="utf-8")
    sys.stderr.write("".join(f"{each}\n" for each in failed))
    return 1 if failed or (stale and "--check" in arguments) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
