"""pydantic models of documents.

A model accepts every document that is valid under its schema, and gives it back: `to_document` of
what it read is the same JSON value. It follows the shape, which admits no less than the schema, so
a model may accept more: validity is decided by the schema, not here.

A member whose name is no Python identifier has another name and keeps its own as alias. Members
that were never set are not given back; a member that was set to None is null.
"""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Iterable
from typing import Annotated, Any, Literal, TypeAlias, Union

import pydantic
import pydantic_core

from penstock.model.json_order import ABSENT
from penstock.model.schema import compiled
from penstock.model.shape import ANY, Arrays, Property, Shape, union
from penstock.runtime.derive.python_names import class_name, identifier

Model: TypeAlias = type[pydantic.BaseModel]
Extra: TypeAlias = Literal["forbid", "ignore"]

_Integer = Annotated[
    int | Annotated[float, pydantic.Field(multiple_of=1)],
    pydantic.Field(union_mode="left_to_right"),
]
"""An integral float beyond 64 bits stays a float: as an integer it would have other digits."""
_SCALARS: dict[str, Any] = {
    "null": None,
    "boolean": bool,
    "integer": _Integer,
    "number": int | float,
    "string": str,
}


def document_model(schema: str, name: str, module: str) -> Model:
    """The model of documents that are published; members that a closed object lacks are refused."""
    return _model(schema, name, module, "forbid")


def source_model(schema: str, name: str, module: str) -> Model:
    """The model of documents that are read; a closed one does not show the document's `_meta`."""
    return _model(schema, name, module, "ignore")


@functools.lru_cache(maxsize=256)
def _model(schema: str, name: str, module: str, closed: Extra) -> Model:
    return _Models(module, closed).of(compiled(schema).shape, name)


class _Models:
    """Makes the models of one schema, nested ones as attributes of the model around them."""

    def __init__(self, module: str, closed: Extra) -> None:
        self._module = module
        self._closed: Extra = closed

    def of(self, shape: Shape, name: str, around: str = "") -> Model:
        qualified = f"{around}.{name}" if around else name
        fields: dict[str, Any] = {}
        nested: dict[str, Model] = {}
        for member, chosen in _field_names(shape.properties).items():
            below = shape.properties[member]
            annotation = self._annotation(below.shape, class_name(member), qualified, nested)
            alias = member if chosen != member else None
            fields[chosen] = (annotation, _field(below, alias))
        with warnings.catch_warnings():  # a member may be called `json`, as old methods are
            warnings.simplefilter("ignore", UserWarning)
            made: Model = pydantic.create_model(
                name,
                __config__=pydantic.ConfigDict(
                    extra=self._closed if shape.objects.closed else "allow",
                    populate_by_name=True,
                    protected_namespaces=(),
                    ser_json_inf_nan="constants",
                ),
                __module__=self._module,
                __qualname__=qualified,
                __validators__=_validators(fields, shape),
                **fields,
            )
        for title, model in nested.items():
            if title not in made.model_fields and not hasattr(made, title):
                setattr(made, title, model)
        return made

    def _annotation(self, shape: Shape, title: str, around: str, nested: dict[str, Model]) -> Any:  # noqa: ANN401
        if shape.impossible or shape.types == ANY.types:
            return Any
        if shape.enum is not None and all(v is None or isinstance(v, str) for v in shape.enum):
            return Literal[tuple(shape.enum)] if shape.enum else Any
        parts: list[Any] = []
        for kind in sorted(shape.types):
            if kind == "array":
                item = _items(shape.arrays)
                parts.append(list[self._annotation(item, title, around, nested)])  # type: ignore[misc]
            elif kind == "object":
                parts.append(self._object(shape, title, around, nested))
            elif kind == "boolean" and shape.not_null != {"boolean"}:
                parts.append(pydantic.StrictBool)  # 0.0 is a number here, and no false
            else:
                parts.append(_SCALARS[kind])
        return Union[tuple(parts)]  # noqa: UP007 - built from values

    def _object(self, shape: Shape, title: str, around: str, nested: dict[str, Model]) -> Any:  # noqa: ANN401
        if shape.properties:
            name = title or "Object"
            model = self.of(shape, name, around)
            nested.setdefault(name, model)
            return model
        additional = shape.objects.additional
        if shape.objects.patterns or additional is None or additional.impossible:
            return dict[str, Any]
        return dict[str, self._annotation(additional, title, around, nested)]  # type: ignore[misc]


def _validators(fields: dict[str, Any], shape: Shape) -> dict[str, Any]:
    renamed = [name for name in fields if name not in shape.properties]
    if shape.objects.closed or not renamed:
        return {}

    def unset(made: pydantic.BaseModel) -> pydantic.BaseModel:
        """An unknown member `a_b` does not set `a-b`, whose attribute is `a_b` as well."""
        extra = made.__pydantic_extra__ or {}
        for name in renamed:
            if name in extra and getattr(made, name) is None:
                made.__pydantic_fields_set__.discard(name)
        return made

    return {"unset": pydantic.model_validator(mode="after")(unset)}


def _items(arrays: Arrays) -> Shape:
    return functools.reduce(union, arrays.prefix, arrays.rest)


def _field(member: Property, alias: str | None) -> Any:  # noqa: ANN401 - pydantic's own
    field: Any = functools.partial(
        pydantic.Field,
        alias=alias,
        title=member.shape.title,
        description=member.shape.description,
    )
    if member.required:
        return field()
    default = member.shape.default
    return field(
        default=None if default is ABSENT else default,
        validate_default=isinstance(default, dict),
    )


def _field_names(members: Iterable[str]) -> dict[str, str]:
    """The attribute of each member: its own name wherever Python and pydantic allow it."""
    names = {member: _field_name(member) for member in members}
    taken = {member for member, name in names.items() if member == name}
    for member, name in names.items():
        if member != name:
            while name in taken:
                name += "_"
            names[member] = name
            taken.add(name)
    return names


def _field_name(member: str) -> str:
    plain = re.sub(r"\W", "_", member).lstrip("_") or "member"
    name = identifier(plain) if plain.isidentifier() else f"m_{plain}"
    return f"{name}_" if name.startswith("model_") and hasattr(pydantic.BaseModel, name) else name


# --- documents ---


def to_document(published: object) -> Any:  # noqa: ANN401 - a JSON value
    """The JSON value of what user code published: a model, or a dictionary."""
    if isinstance(published, pydantic.BaseModel):
        return type(published).__pydantic_serializer__.to_python(
            published, mode="json", by_alias=True, exclude_unset=True, warnings=False
        )
    if isinstance(published, dict):
        return pydantic_core.to_jsonable_python(published, inf_nan_mode="constants")
    raise TypeError(f"published {_article(type(published).__name__)}, not a Document")


def _article(noun: str) -> str:
    return f"{'an' if noun[:1].lower() in 'aeiou' else 'a'} {noun}"
