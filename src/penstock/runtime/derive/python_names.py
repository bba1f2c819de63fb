"""PURE: the names that a Python module uses for things of the catalog.

transform fromInts, from-ints     method from_ints, class ReadFromInts
collection acme/by-day            module acme.by_day
"""

from __future__ import annotations

import keyword
import re

_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_OTHER = re.compile(r"[\W_]+")


def method_name(transform: str) -> str:
    """The method of a transform, in snake case."""
    words = [word for word in _OTHER.split(_CAMEL.sub("_", transform)) if word]
    return identifier("_".join(words).lower())


def class_name(name: str) -> str:
    """The name as part of a class name, in Pascal case."""
    words = [word for word in _OTHER.split(_CAMEL.sub("_", name)) if word]
    return "".join(word[0].upper() + word[1:] for word in words)


def module_name(collection: str) -> str:
    """The module that holds the types of a derivation."""
    parts = (identifier(re.sub(r"\W", "_", part)) for part in collection.split("/"))
    return ".".join(parts)


def identifier(text: str) -> str:
    """The text as a name that Python's grammar allows where it binds one."""
    if not text or text[0].isdigit():
        text = f"_{text}"
    return f"{text}_" if keyword.iskeyword(text) else text
