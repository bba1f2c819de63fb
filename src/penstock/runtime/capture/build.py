"""A capture, from what a catalog says of it to what its leader runs."""

from __future__ import annotations

import base64
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Literal

from penstock.errors import Bug, UserError
from penstock.model import spec as specs
from penstock.model.clock import duration
from penstock.model.json_order import canonical_json
from penstock.model.redact import has_redactions
from penstock.model.schema import compiled
from penstock.model.spec import CaptureSpec, Catalog, CollectionSpec, Endpoint
from penstock.runtime.capture.leader import run_session
from penstock.runtime.capture.task import KIND, CaptureLeaderTask
from penstock.runtime.close_policy import Band, ClosePolicy
from penstock.runtime.connector.capture import Capture, SourceBinding
from penstock.runtime.control import Control
from penstock.runtime.ops import TaskKindName
from penstock.runtime.session import Ended, World
from penstock.runtime.task_log import LEVELS

GATHERED_BYTES_MAX: Final = 64 << 20
"""Bytes of sequences that a transaction takes in; one sequence may have more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedBinding:
    """One binding of a capture as its leader and its Spark tasks see it; picklable."""

    task: str
    index: int
    collection: CollectionSpec
    target: int
    """The collection among the bindings of the publisher."""
    on_invalid: Literal["stop", "skip", "quarantine"]
    salt: bytes = field(repr=False, default=b"")
    hides: bool = False
    """Its schema redacts something."""
    infers: bool = False
    """The schema of its collection is inferred from documents."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureTask:
    """A capture that can be run (`session.RunnableTask`)."""

    leader_task: CaptureLeaderTask
    connector: Capture = field(repr=False)
    sources: tuple[SourceBinding, ...]
    """As the connector sees the bindings."""
    bindings: tuple[CapturedBinding, ...]
    collections: tuple[CollectionSpec, ...]
    """That are filled, each once."""
    interval_s: float
    log_level: int = logging.INFO
    renamed_from: str | None = None

    @property
    def name(self) -> str:
        return self.leader_task.name

    @property
    def kind(self) -> TaskKindName:
        return KIND

    @property
    def quarantine(self) -> int:
        """The binding of the publisher for documents that are refused."""
        return 1 + len(self.collections)

    @property
    def quarantines(self) -> bool:
        return any(binding.on_invalid == "quarantine" for binding in self.bindings)

    def binding(self, index: int) -> CapturedBinding:
        """Return a binding by its index among those of the catalog."""
        for binding in self.bindings:
            if binding.index == index:
                return binding
        raise Bug(f"capture {self.name} has no binding {index}, and its connector reads it")

    async def run_session(self, world: World, control: Control) -> Ended:
        return await run_session(self, world, control)


def build(
    catalog: Catalog,
    spec: CaptureSpec,
    connect: Callable[[Endpoint, str], Capture],
    *,
    name: str | None = None,
) -> CaptureTask:
    """Build a capture. Asks nothing of its endpoint."""
    enabled = [
        (index, binding, binding.target)
        for index, binding in enumerate(spec.bindings)
        if not binding.disable and binding.target is not None
    ]
    if not enabled:
        raise UserError(
            f"capture {spec.name} has nothing to do",
            why="all of its bindings are disabled, or it has none",
            fix="add a binding, or enable one; penstock discover proposes some",
        )
    collections = {target: _collection(catalog, spec, target) for _, _, target in enabled}
    targets = {target: at for at, target in enumerate(collections, start=1)}
    salt = base64.b64decode(spec.redact_salt or "")
    return CaptureTask(
        leader_task=CaptureLeaderTask(
            name=name or spec.name,
            build=specs.fingerprint(spec)[:16],
            targets=tuple(binding.target or "" for binding in spec.bindings),
            policy=ClosePolicy(
                open_age=Band(
                    min=duration(spec.shards.min_txn_s), max=duration(spec.shards.max_txn_s)
                ),
                combiner_bytes=Band(max=GATHERED_BYTES_MAX),
            ),
        ),
        connector=connect(spec.endpoint, spec.name),
        sources=tuple(
            SourceBinding(
                index=index,
                state_key=_state_key(binding),
                resource=binding.resource,
                collection=collections[target],
            )
            for index, binding, target in enabled
        ),
        bindings=tuple(
            CapturedBinding(
                task=name or spec.name,
                index=index,
                collection=collections[target],
                target=targets[target],
                on_invalid=binding.on_invalid,
                salt=salt,
                hides=has_redactions(compiled(collections[target].write_schema.text).shape),
                infers=collections[target].reads_inferred,
            )
            for index, binding, target in enabled
        ),
        collections=tuple(collections.values()),
        interval_s=spec.interval_s,
        log_level=LEVELS[spec.shards.log_level],
        renamed_from=spec.renamed_from,
    )


def _state_key(binding: specs.CaptureBinding) -> str:
    """The resource, and how often it was read from its beginning."""
    return f"{canonical_json(binding.resource.value)}.v{binding.backfill}"


def _collection(catalog: Catalog, spec: CaptureSpec, name: str) -> CollectionSpec:
    found = catalog.collection(name)
    if found is None:
        raise UserError(
            f"there is no collection {name}", where=f"capture {spec.name}", fix="declare it"
        )
    return found
