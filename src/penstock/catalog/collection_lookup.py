"""Look up a collection in a recorded catalog, and the salt of its redacted values."""

from __future__ import annotations

import base64
import binascii
import difflib
from collections.abc import Iterable

from penstock.errors import UsageError, UserError
from penstock.model.schema import compiled
from penstock.model.shape import Shape
from penstock.model.spec import Catalog, CollectionSpec
from penstock.runtime.ops import OPS


def find_collection(catalog: Catalog, name: str) -> CollectionSpec:
    """Return the collection of this name, which may be one that tasks write about themselves."""
    spec = catalog.collection(name) or next((ops for ops in OPS if ops.name == name), None)
    if spec is None:
        raise unknown_collection(name, [known.name for known in catalog.collections])
    return spec


def unknown_collection(name: str, known: Iterable[str]) -> UserError:
    """Return the error for an unknown collection, with the nearest known names."""
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=3)
    listed = f"known: {', '.join(names[:10])}" if names else "define it in the catalog"
    return UserError(
        f"there is no collection {name}",
        fix=f"did you mean {' or '.join(near)}?" if near else listed,
    )


def salt_of(spec: CollectionSpec, catalog: Catalog, given: str | None = None) -> bytes:
    """Return the salt to hash redacted values of a collection with.

    Equal values must have equal hashes whichever way they came, so this is the salt of the tasks
    that write to the collection, if they have one. A schema that hashes nothing needs none.
    """
    if not _hashes(compiled(spec.write_schema.text).shape):
        return b""
    written = {
        capture.redact_salt
        for capture in catalog.captures
        if any(binding.target == spec.name for binding in capture.bindings)
    }
    if spec.derivation is not None:
        written.add(spec.derivation.redact_salt)
    salts = {given} if given else written - {None}
    if len(salts) != 1:
        raise UsageError(
            f"the schema of {spec.name} hashes values, but no salt is given"
            if not salts
            else f"the tasks that write to {spec.name} have different salts",
            fix="pass one in base64: --redact-salt, or PENSTOCK_REDACT_SALT",
        )
    try:
        return base64.b64decode(str(salts.pop()), validate=True)
    except binascii.Error:
        raise UsageError("the salt of redacted values is not valid base64") from None


def _hashes(shape: Shape) -> bool:
    return shape.redact == "sha256" or any(_hashes(below) for _, _, below in shape.children())
