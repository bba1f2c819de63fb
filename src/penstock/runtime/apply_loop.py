"""PURE: brings an endpoint to a task's spec before a session begins.

The connector applies the spec, and may answer with patches of its state: it then wants to be called
again with them, once they are durable. The spec counts as applied when it has nothing more to say.

A crash in between applies it again, from the *old* spec and a state that is ahead of it: so what a
connector does here can be repeated from any half-way point, and `last_applied` is written last and
alone. Specs are compared as canonical bytes, never as a caller framed them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, TypeAlias

from penstock.errors import PenstockError
from penstock.model.json_order import Json
from penstock.runtime.connector.common import Applied
from penstock.runtime.patches import apply_patches
from penstock.runtime.protocol import Persisted, PersistRecord, RecordKind, out_of_turn
from penstock.runtime.recovery import Persist

APPLIES_MAX: Final = 3


class NotConverged(PenstockError):
    """A connector that always wants to be called once more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Apply:
    """An action: call the connector."""

    last_applied: bytes | None
    """The spec that was applied before; None at first, or if no session got that far."""
    state: Json


@dataclass(frozen=True, slots=True, kw_only=True)
class Applying:
    """Waits for the connector."""

    spec: bytes
    last_applied: bytes | None
    state: Json
    applies: int = 1
    """Number of calls, this one included."""
    seq_no: int = 0
    """Number of the last record."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordingApply:
    """Waits until a record is durable: patches, or that the spec is applied."""

    after: Applying
    converged: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Converged:
    """The endpoint is as the spec wants it."""

    state: Json
    """The connector's state, to be opened with."""
    seq_no: int


ApplyLoop: TypeAlias = Applying | RecordingApply | Converged
Action: TypeAlias = Apply | PersistRecord


def begin(
    *, spec: bytes, last_applied: bytes | None, state: Json, seq_no: int = 0
) -> tuple[ApplyLoop, Action]:
    """Materializations apply once per session at least, also what was applied before."""
    loop = Applying(spec=spec, last_applied=last_applied, state=state, seq_no=seq_no)
    return loop, Apply(last_applied=last_applied, state=state)


def step(loop: ApplyLoop, event: Applied | Persisted | None) -> tuple[ApplyLoop, Action | None]:
    """Return the loop after an answer (None: the stream ended), and what to do next."""
    match loop, event:
        case Applying(), Applied(patches=()):
            if loop.spec == loop.last_applied:
                return Converged(state=loop.state, seq_no=loop.seq_no), None
            return _persist(loop, Persist(last_applied=loop.spec), converged=True)
        case Applying(), Applied(patches=patches):
            if loop.applies == APPLIES_MAX:
                raise NotConverged(
                    "apply did not converge",
                    why=f"the connector wants a call after {APPLIES_MAX} of them",
                    fix="report this to the connector's maintainers",
                )
            advanced = replace(loop, state=apply_patches(loop.state, patches))
            return _persist(advanced, Persist(patches=patches), converged=False)
        case RecordingApply(after=after), Persisted(seq_no) if seq_no == after.seq_no:
            if loop.converged:
                return Converged(state=after.state, seq_no=seq_no), None
            again = replace(after, applies=after.applies + 1)
            return again, Apply(last_applied=again.last_applied, state=again.state)
        case Applying(), _:
            raise out_of_turn(event, waits_for="Applied")
        case RecordingApply(after=after), _:
            raise out_of_turn(event, waits_for=f"Persisted of record {after.seq_no}")
        case _:
            raise out_of_turn(event, waits_for="nothing: the spec is applied")


def _persist(loop: Applying, record: Persist, *, converged: bool) -> tuple[ApplyLoop, Action]:
    loop = replace(loop, seq_no=loop.seq_no + 1)
    action = PersistRecord(seq_no=loop.seq_no, kind=RecordKind.APPLY, record=record)
    return RecordingApply(after=loop, converged=converged), action
