"""Hints for forms that other or older tools understand: what to write instead."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from penstock.catalog.nodes import Node


def derive_instead(trail: Sequence[Node]) -> str:
    """Rewrite an old `derivation` as a `derive` stanza with the same transforms."""
    transforms = trail[-1].get("transform")
    lines = [
        "write it as a derive stanza:",
        "derive:",
        "  using: {python: {module: derivation.py}}",
        "  transforms:",
    ]
    for name, transform in transforms.members.items() if transforms else ():
        source = transform.get("source")
        collection = (source.text or source.text_of("name")) if source else None
        lines += [f"    - name: {name}", f"      source: {collection or '…'}"]
        shuffle = transform.get("shuffle")
        if shuffle is not None:
            written = shuffle.text or json.dumps(shuffle.plain(), ensure_ascii=False)
            lines.append(f"      shuffle: {written}")
    return "\n".join(lines)


def python_instead(trail: Sequence[Node]) -> str:
    """Sketch the Python module of a TypeScript derivation."""
    names = trail[-1].pointer.split("/")
    collection = names[names.index("collections") + 1] if "collections" in names else "collection"
    module = collection.replace("~1", ".").replace("~0", "~")
    transforms = trail[-3].get("transforms") if len(trail) >= 3 else None
    lines = [
        "write the same methods in Python, with using: {python: {module: derivation.py}}:",
        f"from {module} import Document, IDerivation",
        "",
        "class Derivation(IDerivation):",
    ]
    for transform in transforms.items if transforms else ():
        method = snake_case(transform.text_of("name") or "transform")
        lines += [f"    async def {method}(self, read):", "        yield Document(…)"]
    return "\n".join(lines if len(lines) > 4 else [*lines, "    …"])


def snake_case(name: str) -> str:
    """Spell `fromInts` as Python does: `from_ints`."""
    parted = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name)
    return re.sub(r"\W", "_", parted).lower()
