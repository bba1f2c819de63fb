"""The types module of a derivation: what `from acme.totals import Document, IDerivation` finds.

It is made in memory, from the schemas. Modules for Estuary Flow import it in three generations:

    Open, StartCommit, StartedCommit, ReadFromInts       beside Document and SourceFromInts
    Request.Open, Request.ReadFromInts, Response.StartedCommit, Response.StartedCommit.State
    Request.Open, EndpointConfig, Response.Flushed, ConnectorState; IDerivation[Config]

All of them are always there: each name means the same thing in every generation that has it.
"""

from __future__ import annotations

import types
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, ClassVar

import pydantic

from penstock.model.json_order import Json
from penstock.runtime.derive.python_models import Model, document_model, source_model
from penstock.runtime.derive.python_names import class_name, method_name, module_name


class _Message(pydantic.BaseModel):
    """A message of the interface; members that it does not know are kept."""

    model_config = pydantic.ConfigDict(extra="allow", populate_by_name=True)

    def __class_getitem__(cls, _: object) -> Any:  # noqa: ANN401 - as `Request.Open[Config]`
        return cls


class ConnectorState(_Message):
    """How the state changes: `updated` is merged into it if `merge_patch`, or else replaces it."""

    updated: Any = None
    merge_patch: bool = pydantic.Field(default=False, alias="mergePatch")


class Open(_Message):
    """Opens a derivation with the state of its last transaction, `{}` at first."""

    state: Any = pydantic.Field(default_factory=dict)
    resources: list[Any] = pydantic.Field(default_factory=list)


class Flush(_Message):
    """Ends the reads of a transaction."""

    state_patches: list[Any] = pydantic.Field(default_factory=list, alias="statePatches")


class StartCommit(_Message):
    """Begins the commit of a transaction."""

    runtime_checkpoint: Any = pydantic.Field(default=None, alias="runtimeCheckpoint")


class Reset(_Message):
    """Forgets all state, between tests."""


class Validate(_Message):
    """Names the transforms of a derivation."""

    name: str = ""
    transforms: list[Any] = pydantic.Field(default_factory=list)


class StartedCommit(_Message):
    """Answers `StartCommit`, with the state's change if there is one."""

    State: ClassVar[type[ConnectorState]] = ConnectorState
    state: ConnectorState | None = None


class Flushed(_Message):
    """Answers `Flush`. `more` asks for another call, with the patches of this one."""

    State: ClassVar[type[ConnectorState]] = ConnectorState
    state: ConnectorState | None = None
    more: bool = False


class Validated(_Message):
    """Answers `Validate`."""

    class Transform(_Message):
        """What is known of one transform."""

        read_only: bool = pydantic.Field(default=False, alias="readOnly")

    transforms: list[Any] = pydantic.Field(default_factory=list)


class Published(_Message):
    """A document that was published."""

    doc: Any


class Opened(_Message):
    """Answers `Open`."""


class Configuration(pydantic.BaseModel):
    """A configuration without a schema: each member is an attribute."""

    model_config = pydantic.ConfigDict(extra="allow", protected_namespaces=())


class BaseDerivation:
    """What every `IDerivation` can do."""

    concurrency: ClassVar[int | None] = None
    """How many reads asynchronous methods may work on at once: 16, or 1 for a class with state."""
    config_type: ClassVar[Any] = None
    """The class of `config`, where `IDerivation[Config]` names one."""
    keyed: Any
    """State by key, for any number of shards: `KeyedState`, set before `__init__` runs."""

    def __init__(self, open: Open | None = None, config: Any = None) -> None:  # noqa: A002, ANN401
        """Take what every derivation is opened with; subclasses keep what they need."""

    def __class_getitem__(cls, parameters: Any) -> type[BaseDerivation]:  # noqa: ANN401
        first = parameters[0] if isinstance(parameters, tuple) else parameters
        return type(cls.__name__, (cls,), {"config_type": first, "__module__": cls.__module__})

    async def flush(self, *_: Any) -> AsyncIterator[Any]:  # noqa: ANN401
        """Publish what the transaction has not published yet: nothing."""
        nothing: tuple[Any, ...] = ()
        for document in nothing:
            yield document

    def start_commit(self, start_commit: StartCommit) -> StartedCommit:
        """Say how the state changed: not at all."""
        return StartedCommit()

    async def reset(self) -> None:
        """Forget everything, between tests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformTypes:
    """A transform, as far as its types matter."""

    name: str
    read_schema: str
    """The source's read schema, as canonical JSON."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DerivationTypes:
    """The types module of one derivation, and what the runtime takes from it."""

    module: types.ModuleType
    document: Model
    reads: tuple[Model, ...]
    """The class that wraps documents of each transform: `doc` is the document."""
    config: Model


def make_types(
    collection: str,
    write_schema: str,
    transforms: tuple[TransformTypes, ...],
    config_schema: str | None = None,
) -> DerivationTypes:
    """Make the types module of a derivation. Its models are shared with modules made before."""
    name = module_name(collection)
    module = types.ModuleType(name, f"The types of {collection}.")
    document = document_model(write_schema, "Document", name)
    config = source_model(config_schema, "EndpointConfig", name) if config_schema else Configuration
    sources, reads = {}, {}
    for at, transform in enumerate(transforms):
        title = class_name(transform.name)
        source = source_model(transform.read_schema, f"Source{title}", name)
        sources[f"Source{title}"] = source
        reads[f"Read{title}"] = pydantic.create_model(
            f"Read{title}",
            __base__=_Message,
            __module__=name,
            doc=(source, ...),
            transform=(int, at),
        )
    requests = {
        "Open": Open,
        "Flush": Flush,
        "StartCommit": StartCommit,
        "Reset": Reset,
        "Validate": Validate,
        "Transform": _Message,
    }
    responses = {
        "Opened": Opened,
        "Published": Published,
        "Flushed": Flushed,
        "StartedCommit": StartedCommit,
        "Validated": Validated,
        "ConnectorState": ConnectorState,
    }
    vars(module).update(
        sources,
        **reads,
        **{key: value for key, value in (requests | responses).items() if key != "Transform"},
        Document=document,
        EndpointConfig=config,
        ResourceConfig=Configuration,
        Request=type("Request", (_Message,), {"__module__": name, **_marked(requests | reads)}),
        Response=type("Response", (_Message,), {"__module__": name, **_marked(responses)}),
        IDerivation=_base(name, transforms),
    )
    return DerivationTypes(
        module=module, document=document, reads=tuple(reads.values()), config=config
    )


def _marked(members: dict[str, Any]) -> dict[str, Any]:
    """Members of a message class that are classes, and no fields."""
    return {**members, "__annotations__": dict.fromkeys(members, ClassVar[Any])}


def _base(module: str, transforms: tuple[TransformTypes, ...]) -> type[BaseDerivation]:
    """The class that `Derivation` extends. A method that it lacks is found when it is opened."""
    about = ", ".join(method_name(transform.name) for transform in transforms)
    doc = f"Extend it with the methods of the transforms: {about}."
    return type("IDerivation", (BaseDerivation,), {"__module__": module, "__doc__": doc})


def state_of(answer: object) -> tuple[Json, bool] | None:
    """The value and the merge flag of a state change that user code answered; None if none."""
    state = answer if isinstance(answer, ConnectorState) else getattr(answer, "state", None)
    if isinstance(state, dict):
        state = ConnectorState.model_validate(state)
    if state is None:
        return None
    updated = getattr(state, "updated", None)
    if isinstance(updated, pydantic.BaseModel):
        updated = updated.model_dump(mode="json", by_alias=True)
    return updated, bool(getattr(state, "merge_patch", False))
