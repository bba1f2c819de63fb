"""In the process of a capture: a dlt resource, read as such a function is.

dlt keeps the cursor of an incremental resource in a state, which is ours here: it is given to the
resource, and what the resource has made of it at the end is the next State. Before the end it is
not: the rows of a resource need not come in the order of its cursor.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from typing import Any, Final

from penstock.capture import State
from penstock.connectors.python_source.worker import Mistake

_TYPES: Final[dict[str, dict[str, Any]]] = {
    "text": {"type": "string"},
    "bigint": {"type": "integer"},
    "double": {"type": "number"},
    "bool": {"type": "boolean"},
    "timestamp": {"type": "string", "format": "date-time"},
    "date": {"type": "string", "format": "date"},
    "binary": {"type": "string"},
    "decimal": {"type": "number"},
}


class DltSource:
    """What `dlt:module:resource` names: a resource, or a dlt source that has several."""

    def __init__(self, place: str, config: dict[str, Any]) -> None:
        module_name, colon, name = place.partition(":")
        if not colon or not module_name or not name:
            raise Mistake(f"dlt:{place} names no resource; write dlt:package.module:resource")
        try:
            import dlt  # noqa: F401 - is it there?
        except ImportError:
            raise Mistake("dlt is not installed: pip install 'penstock[dlt]'") from None
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
                raise
            raise Mistake(
                f"there is no module {module_name}; it has to be installed, or be in the directory "
                "in which Penstock runs"
            ) from None
        found = getattr(module, name, None)
        if found is None:
            raise Mistake(f"the module {module_name} has no {name}")
        self.files = [module.__file__ or ""]
        self._resources = _resources(found, name, config)

    def read(self, state: dict[str, Any]) -> Iterator[Any]:
        """Yield the rows of each resource, and at the end of it the state."""
        from dlt.common.json import json

        state = dict(state)
        for resource in self._resources:
            kept = json.typed_loads(state[resource.name]) if resource.name in state else {}
            for item in _items(resource, kept):
                yield resource.name, _rows(item)
            state[resource.name] = json.typed_dumps(kept)
            yield State(state)

    def discover(self) -> list[dict[str, Any]]:
        """The streams, with what dlt knows of their columns."""
        return [_described(resource) for resource in self._resources]

    def check(self) -> None:
        """There is nothing to check that was not when it was made."""


def _resources(found: Any, name: str, config: dict[str, Any]) -> list[Any]:  # noqa: ANN401 - dlt's
    """Bind the configuration as arguments, and return the resources."""
    from dlt.extract import DltResource, DltSource

    made = found
    if callable(found) and not (isinstance(found, DltResource) and found.args_bound):
        made = found(**config)
    elif config:
        raise Mistake(f"{name} takes no arguments, and config has {', '.join(config)}")
    if isinstance(made, DltSource):
        return list(made.selected_resources.values())
    if isinstance(made, DltResource):
        return [made]
    raise Mistake(f"{name} is a {type(made).__name__}, and no dlt resource or source")


def _items(resource: Any, state: dict[str, Any]) -> Iterator[Any]:  # noqa: ANN401 - dlt's
    """What a resource yields; it reads and changes `state`."""
    from dlt.common.configuration.container import Container
    from dlt.common.pipeline import StateInjectableContext

    context: Any = StateInjectableContext
    with Container().injectable_context(context(state=state)):
        items = iter(resource)
    yield from items


def _rows(item: Any) -> Any:  # noqa: ANN401 - whatever a resource yields
    pandas = sys.modules.get("pandas")
    if pandas is not None and isinstance(item, pandas.DataFrame):
        import pyarrow as pa

        return pa.Table.from_pandas(item, preserve_index=False)
    return item


def _described(resource: Any) -> dict[str, Any]:  # noqa: ANN401 - dlt's
    columns = resource.compute_table_schema().get("columns", {})
    key = [name for name, column in columns.items() if column.get("primary_key")]
    properties = {name: _TYPES.get(str(col.get("data_type")), {}) for name, col in columns.items()}
    return {
        "stream": resource.name,
        "schema": {"type": "object", "required": key, "properties": properties},
        "key": [f"/{name.replace('~', '~0').replace('/', '~1')}" for name in key],
        "note": None if key else "the resource names no primary_key: choose a key",
    }
