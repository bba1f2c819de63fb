from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SessionRequest(_message.Message):
    __slots__ = ("open", "next_checkpoint", "consumed", "caught_up")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    NEXT_CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    CONSUMED_FIELD_NUMBER: _ClassVar[int]
    CAUGHT_UP_FIELD_NUMBER: _ClassVar[int]
    open: Open
    next_checkpoint: NextCheckpoint
    consumed: Consumed
    caught_up: CaughtUp
    def __init__(self, open: _Optional[_Union[Open, _Mapping]] = ..., next_checkpoint: _Optional[_Union[NextCheckpoint, _Mapping]] = ..., consumed: _Optional[_Union[Consumed, _Mapping]] = ..., caught_up: _Optional[_Union[CaughtUp, _Mapping]] = ...) -> None: ...

class Open(_message.Message):
    __slots__ = ("name", "shards", "resume", "more")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    RESUME_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    name: str
    shards: int
    resume: bytes
    more: bool
    def __init__(self, name: _Optional[str] = ..., shards: _Optional[int] = ..., resume: _Optional[bytes] = ..., more: _Optional[bool] = ...) -> None: ...

class NextCheckpoint(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Consumed(_message.Message):
    __slots__ = ("checkpoint",)
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    checkpoint: int
    def __init__(self, checkpoint: _Optional[int] = ...) -> None: ...

class SessionResponse(_message.Message):
    __slots__ = ("opened", "checkpoint", "caught_up", "waiting", "failure")
    OPENED_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    CAUGHT_UP_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    opened: Opened
    checkpoint: CheckpointPart
    caught_up: CaughtUp
    waiting: Waiting
    failure: Failure
    def __init__(self, opened: _Optional[_Union[Opened, _Mapping]] = ..., checkpoint: _Optional[_Union[CheckpointPart, _Mapping]] = ..., caught_up: _Optional[_Union[CaughtUp, _Mapping]] = ..., waiting: _Optional[_Union[Waiting, _Mapping]] = ..., failure: _Optional[_Union[Failure, _Mapping]] = ...) -> None: ...

class Opened(_message.Message):
    __slots__ = ("bindings",)
    BINDINGS_FIELD_NUMBER: _ClassVar[int]
    bindings: _containers.RepeatedCompositeFieldContainer[Binding]
    def __init__(self, bindings: _Optional[_Iterable[_Union[Binding, _Mapping]]] = ...) -> None: ...

class Binding(_message.Message):
    __slots__ = ("index", "collection", "read_suffix", "priority")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    COLLECTION_FIELD_NUMBER: _ClassVar[int]
    READ_SUFFIX_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    index: int
    collection: str
    read_suffix: str
    priority: int
    def __init__(self, index: _Optional[int] = ..., collection: _Optional[str] = ..., read_suffix: _Optional[str] = ..., priority: _Optional[int] = ...) -> None: ...

class CheckpointPart(_message.Message):
    __slots__ = ("checkpoint", "frontier", "journals", "fragments", "deliveries", "more")
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    FRONTIER_FIELD_NUMBER: _ClassVar[int]
    JOURNALS_FIELD_NUMBER: _ClassVar[int]
    FRAGMENTS_FIELD_NUMBER: _ClassVar[int]
    DELIVERIES_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    checkpoint: int
    frontier: bytes
    journals: _containers.RepeatedScalarFieldContainer[str]
    fragments: _containers.RepeatedScalarFieldContainer[bytes]
    deliveries: _containers.RepeatedCompositeFieldContainer[Delivery]
    more: bool
    def __init__(self, checkpoint: _Optional[int] = ..., frontier: _Optional[bytes] = ..., journals: _Optional[_Iterable[str]] = ..., fragments: _Optional[_Iterable[bytes]] = ..., deliveries: _Optional[_Iterable[_Union[Delivery, _Mapping]]] = ..., more: _Optional[bool] = ...) -> None: ...

class Delivery(_message.Message):
    __slots__ = ("continued", "journal", "binding", "producer", "commit", "bytes", "rows", "level")
    CONTINUED_FIELD_NUMBER: _ClassVar[int]
    JOURNAL_FIELD_NUMBER: _ClassVar[int]
    BINDING_FIELD_NUMBER: _ClassVar[int]
    PRODUCER_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    continued: bool
    journal: int
    binding: int
    producer: int
    commit: int
    bytes: int
    rows: _containers.RepeatedCompositeFieldContainer[VisibleRows]
    level: int
    def __init__(self, continued: _Optional[bool] = ..., journal: _Optional[int] = ..., binding: _Optional[int] = ..., producer: _Optional[int] = ..., commit: _Optional[int] = ..., bytes: _Optional[int] = ..., rows: _Optional[_Iterable[_Union[VisibleRows, _Mapping]]] = ..., level: _Optional[int] = ...) -> None: ...

class VisibleRows(_message.Message):
    __slots__ = ("fragment", "run", "clock_gt", "running_max")
    FRAGMENT_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    CLOCK_GT_FIELD_NUMBER: _ClassVar[int]
    RUNNING_MAX_FIELD_NUMBER: _ClassVar[int]
    fragment: int
    run: int
    clock_gt: int
    running_max: bool
    def __init__(self, fragment: _Optional[int] = ..., run: _Optional[int] = ..., clock_gt: _Optional[int] = ..., running_max: _Optional[bool] = ...) -> None: ...

class CaughtUp(_message.Message):
    __slots__ = ("revision",)
    REVISION_FIELD_NUMBER: _ClassVar[int]
    revision: int
    def __init__(self, revision: _Optional[int] = ...) -> None: ...

class Waiting(_message.Message):
    __slots__ = ("why",)
    WHY_FIELD_NUMBER: _ClassVar[int]
    why: str
    def __init__(self, why: _Optional[str] = ...) -> None: ...

class Failure(_message.Message):
    __slots__ = ("kind", "what", "where", "why", "fix")
    KIND_FIELD_NUMBER: _ClassVar[int]
    WHAT_FIELD_NUMBER: _ClassVar[int]
    WHERE_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    FIX_FIELD_NUMBER: _ClassVar[int]
    kind: str
    what: str
    where: str
    why: str
    fix: str
    def __init__(self, kind: _Optional[str] = ..., what: _Optional[str] = ..., where: _Optional[str] = ..., why: _Optional[str] = ..., fix: _Optional[str] = ...) -> None: ...
