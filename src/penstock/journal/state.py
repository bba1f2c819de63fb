"""PURE: the state of a journal, and the diffs that make it.

A journal is a sequence of *records* that tile its offsets: a **fragment** takes one offset for each
of its rows, an **ACK** takes one and has no row. Offsets are given when an append commits, since
several producers share a journal and a lost compare-and-set simply offers the same records again.

Invariants, kept by `apply` for every sequence of diffs:

- records lie side by side: each begins where the one before ends, `pages` first, then `records`;
- an offset, once given, is never given to another row: `end` only grows, also when the journal is
  dropped and created again;
- what a record says of its rows (offsets, runs, revision) never changes. Compaction moves rows to
  another file and nothing else, so a reader half-way through does not notice.

`revision` is the store's at which a record was appended: cutting all journals of a transaction at
one revision is what keeps the transaction in one piece. A writer does not know it before the
commit; `UNKNOWN` stands for it until the entry is read back.
"""

from __future__ import annotations

import enum
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from penstock.errors import Bug, PenstockError
from penstock.model.clock import NEVER, Clock, Producer
from penstock.model.hints import Commit
from penstock.model.runs import Run

UNKNOWN: Final = 0
"""The revision of a record whose entry was written by this process and not yet read back."""

INLINE_BYTES_MAX: Final = 4 * 1024
"""Rows up to this size travel in the diff itself: no object to write, none to fetch."""

RECORDS_MAX: Final = 256
"""Records in the state itself; above, the oldest are sealed into a page. Few enough that opening a
journal takes some milliseconds, enough that a page is worth an object."""

# ------------------------------------------------------------------------------------- records


class Digest(Struct, frozen=True, kw_only=True, gc=False):
    """Sizes and hash by which damage to an object is noticed (`integrity`)."""

    bytes: int
    """The size of the object."""
    footer: int
    """The size of its footer, which is the end of it."""
    value: int
    """XXH3 of the footer."""
    rows: int
    """All rows of the object, whichever of them a journal names."""


class Blob(Struct, frozen=True, kw_only=True, gc=False):
    """Rows in an object of the blob store, from row `row` of it on."""

    path: str
    row: int = 0
    digest: Digest | None = None
    """None if it was written by a release that took none."""


class Inline(Struct, frozen=True, kw_only=True, gc=False):
    """Rows in the state itself, as `fragments.encode_inline` packs them."""

    data: bytes


class Fragment(Struct, frozen=True, kw_only=True, gc=False):
    """Rows appended together. Runs have offsets relative to `begin`, as their writer saw them."""

    begin: int = 0
    revision: int = UNKNOWN
    rows: int
    bytes: int
    """Stored size: of the object, or of the inline data; a share of it after compaction."""
    at: Blob | Inline
    schema: str
    """Fingerprint of the collection schema the rows were written under."""
    runs: tuple[Run, ...]
    key_hash_min: int
    key_hash_max: int

    def __post_init__(self) -> None:
        if self.rows < 1 or sum([run.rows for run in self.runs]) != self.rows:
            raise ValueError(f"runs {self.runs} do not add up to {self.rows} rows")

    @property
    def end(self) -> int:
        return self.begin + self.rows

    def placed(self, begin: int, revision: int) -> Fragment:
        """The fragment where its append has put it."""
        return replace(self, begin=begin, revision=revision)

    def runs_at(self) -> tuple[Run, ...]:
        """The runs with the journal's offsets."""
        return tuple(run.moved(self.begin) for run in self.runs)


class AckRecord(Struct, frozen=True, kw_only=True, gc=False):
    """Closes what its producer wrote to this journal, and hints at the rest of the transaction."""

    begin: int = 0
    revision: int = UNKNOWN
    producer: Producer
    clock: Clock
    hints: tuple[Commit, ...] = ()

    @property
    def end(self) -> int:
        return self.begin + 1

    def placed(self, begin: int, revision: int) -> AckRecord:
        """The ACK where its append has put it."""
        return replace(self, begin=begin, revision=revision)


Record = Fragment | AckRecord


class Page(Struct, frozen=True, kw_only=True, gc=False):
    """Old records, sealed into an object of the blob store; what planning needs without them."""

    path: str
    begin: int
    end: int
    records: int
    rows: int
    bytes: int
    revision_min: int
    revision_max: int
    digest: int | None = None
    """XXH3 of the object; None if it was written by a release that took none."""


class Forgotten(Struct, frozen=True, kw_only=True, gc=False):
    """The last of what retention has taken from a journal since it was created."""

    clock: Clock = NEVER
    """The latest commit."""
    revision: int = 0
    """The revision of the last record; 0 if nothing was taken."""


NOTHING_FORGOTTEN: Final = Forgotten()


class Status(enum.Enum):
    """The life of a journal: readers see it, and it takes appends, while it is active."""

    ABSENT = "absent"
    ACTIVE = "active"
    DROPPED = "dropped"


class JournalState(Struct, frozen=True, kw_only=True, gc=False):
    """A journal as of one entry of its state log."""

    status: Status = Status.ABSENT
    collection: str = ""
    labels: tuple[tuple[str, str], ...] = ()
    """Sorted by name: partition values in their encoded text, and whatever an operator adds."""
    key_begin: int = 0
    key_end: int = 0xFFFFFFFF
    generation: int = 0
    """Counts creations, so that a reader notices a journal that was dropped and recreated."""
    begin: int = 0
    """The first offset that is retained."""
    end: int = 0
    """The offset the next record gets."""
    pages: tuple[Page, ...] = ()
    records: tuple[Record, ...] = ()
    forgotten: Forgotten = NOTHING_FORGOTTEN

    @property
    def readable(self) -> bool:
        return self.status is Status.ACTIVE


# --------------------------------------------------------------------------------------- diffs


class Create(Struct, frozen=True, kw_only=True, gc=False):
    """Begin, or begin again; offsets go on where a dropped journal ended."""

    collection: str
    labels: tuple[tuple[str, str], ...]
    key_begin: int
    key_end: int


class Append(Struct, frozen=True, kw_only=True, gc=False):
    """Records in order, offsets not yet given."""

    records: tuple[Record, ...]


class Retain(Struct, frozen=True, kw_only=True, gc=False):
    """Forget records that lie wholly below `offset`; pages stay if any record of theirs does.

    With `page`, the records of the page that holds `offset` are in this one from there on.
    """

    offset: int
    forgotten: Forgotten = NOTHING_FORGOTTEN
    page: Page | None = None


class Compact(Struct, frozen=True, kw_only=True, gc=False):
    """The rows of the fragments in `[begin, end)`, in their order, are now one object."""

    begin: int
    end: int
    path: str
    bytes: int
    digest: Digest | None = None


class Seal(Struct, frozen=True, kw_only=True, gc=False):
    """The first records of the state are now in a page."""

    page: Page


class Reseal(Struct, frozen=True, kw_only=True, gc=False):
    """The records of some pages, in their order, are now in one; rows of theirs may have moved."""

    page: Page


class Drop(Struct, frozen=True, kw_only=True, gc=False):
    """The journal is gone; its offsets are not given again."""


Diff = Create | Append | Retain | Compact | Seal | Reseal | Drop


class Refused(PenstockError):
    """The journal is not in a state for this."""


def apply(state: JournalState, diff: Diff, revision: int) -> JournalState:
    """The state after `diff`, which was committed at `revision`."""
    match diff:
        case Create():
            return _create(state, diff)
        case Append():
            return _append(state, diff, revision)
        case Retain():
            return _retain(state, diff)
        case Compact():
            return _compact(state, diff)
        case Seal():
            return _seal(state, diff.page)
        case Reseal():
            return _reseal(state, diff.page)
        case Drop():
            _require(state, Status.ACTIVE)
            return JournalState(
                status=Status.DROPPED,
                collection=state.collection,
                generation=state.generation,
                begin=state.end,
                end=state.end,
            )


def _require(state: JournalState, *allowed: Status) -> None:
    if state.status not in allowed:
        raise Refused(
            f"the journal is {state.status.value}",
            why=f"this needs it to be {' or '.join(s.value for s in allowed)}",
        )


def _create(state: JournalState, diff: Create) -> JournalState:
    _require(state, Status.ABSENT, Status.DROPPED)
    return JournalState(
        status=Status.ACTIVE,
        collection=diff.collection,
        labels=diff.labels,
        key_begin=diff.key_begin,
        key_end=diff.key_end,
        generation=state.generation + 1,
        begin=state.end,
        end=state.end,
    )


def _append(state: JournalState, diff: Append, revision: int) -> JournalState:
    _require(state, Status.ACTIVE)
    placed: list[Record] = []
    end = state.end
    for record in diff.records:
        placed.append(record.placed(end, revision))
        end = placed[-1].end
    return replace(state, end=end, records=(*state.records, *placed))


def _retain(state: JournalState, diff: Retain) -> JournalState:
    _require(state, Status.ACTIVE)
    pages = tuple(page for page in state.pages if page.end > diff.offset)
    if (page := diff.page) is not None:
        if not pages or not pages[0].begin < page.begin == diff.offset < page.end == pages[0].end:
            raise Refused(
                f"offsets {page.begin} to {page.end} are not the end of a page of the state",
                why="it was sealed anew or forgotten meanwhile",
            )
        pages = (page, *pages[1:])
    records = state.records
    if not pages:
        records = tuple(record for record in records if record.end > diff.offset)
    kept = [*pages, *records]
    return replace(
        state,
        begin=kept[0].begin if kept else state.end,
        pages=pages,
        records=records,
        forgotten=Forgotten(
            clock=max(state.forgotten.clock, diff.forgotten.clock),
            revision=max(state.forgotten.revision, diff.forgotten.revision),
        ),
    )


def _compact(state: JournalState, diff: Compact) -> JournalState:
    _require(state, Status.ACTIVE)
    inside = [
        r for r in state.records if isinstance(r, Fragment) and diff.begin <= r.begin < diff.end
    ]
    if not inside or inside[0].begin != diff.begin or inside[-1].end != diff.end:
        raise Refused(
            f"offsets {diff.begin} to {diff.end} are not whole fragments of the state",
            why="they were compacted, sealed or forgotten meanwhile",
        )
    if len({fragment.schema for fragment in inside}) > 1:
        raise Bug("fragments of several schemas cannot share an object")
    rows = sum(fragment.rows for fragment in inside)
    moved: dict[int, Fragment] = {}
    row = 0
    for fragment in inside:
        moved[fragment.begin] = replace(
            fragment,
            at=Blob(path=diff.path, row=row, digest=diff.digest),
            bytes=diff.bytes * (row + fragment.rows) // rows - diff.bytes * row // rows,
        )
        row += fragment.rows
    return replace(state, records=tuple(moved.get(r.begin, r) for r in state.records))


def _seal(state: JournalState, page: Page) -> JournalState:
    _require(state, Status.ACTIVE)
    sealed = state.records[: page.records]
    if not sealed or (sealed[0].begin, sealed[-1].end) != (page.begin, page.end):
        raise Refused(
            f"offsets {page.begin} to {page.end} are not the first records of the state",
            why="they were sealed or forgotten meanwhile",
        )
    return replace(state, pages=(*state.pages, page), records=state.records[page.records :])


def _reseal(state: JournalState, page: Page) -> JournalState:
    _require(state, Status.ACTIVE)
    inside = [each for each in state.pages if page.begin <= each.begin < page.end]
    records = sum(each.records for each in inside)
    if not inside or (inside[0].begin, inside[-1].end, records) != (
        page.begin,
        page.end,
        page.records,
    ):
        raise Refused(
            f"offsets {page.begin} to {page.end} are not whole pages of the state",
            why="they were sealed again or forgotten meanwhile",
        )
    at = state.pages.index(inside[0])
    pages = (*state.pages[:at], page, *state.pages[at + len(inside) :])
    return replace(state, pages=pages)
