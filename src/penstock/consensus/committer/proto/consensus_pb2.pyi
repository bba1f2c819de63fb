from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Determinacy(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DETERMINACY_UNSPECIFIED: _ClassVar[Determinacy]
    DETERMINATE: _ClassVar[Determinacy]
    INDETERMINATE: _ClassVar[Determinacy]
DETERMINACY_UNSPECIFIED: Determinacy
DETERMINATE: Determinacy
INDETERMINATE: Determinacy

class Versioned(_message.Message):
    __slots__ = ("seqno", "data", "revision")
    SEQNO_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    seqno: int
    data: bytes
    revision: int
    def __init__(self, seqno: _Optional[int] = ..., data: _Optional[bytes] = ..., revision: _Optional[int] = ...) -> None: ...

class OpError(_message.Message):
    __slots__ = ("determinacy", "kind", "message", "retry_after_ms")
    DETERMINACY_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    determinacy: Determinacy
    kind: str
    message: str
    retry_after_ms: int
    def __init__(self, determinacy: _Optional[_Union[Determinacy, str]] = ..., kind: _Optional[str] = ..., message: _Optional[str] = ..., retry_after_ms: _Optional[int] = ...) -> None: ...

class HeadRequest(_message.Message):
    __slots__ = ("key", "fresh", "expect_incarnation")
    KEY_FIELD_NUMBER: _ClassVar[int]
    FRESH_FIELD_NUMBER: _ClassVar[int]
    EXPECT_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    key: str
    fresh: bool
    expect_incarnation: bytes
    def __init__(self, key: _Optional[str] = ..., fresh: _Optional[bool] = ..., expect_incarnation: _Optional[bytes] = ...) -> None: ...

class HeadOk(_message.Message):
    __slots__ = ("current",)
    CURRENT_FIELD_NUMBER: _ClassVar[int]
    current: Versioned
    def __init__(self, current: _Optional[_Union[Versioned, _Mapping]] = ...) -> None: ...

class HeadResponse(_message.Message):
    __slots__ = ("ok", "err", "incarnation")
    OK_FIELD_NUMBER: _ClassVar[int]
    ERR_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ok: HeadOk
    err: OpError
    incarnation: bytes
    def __init__(self, ok: _Optional[_Union[HeadOk, _Mapping]] = ..., err: _Optional[_Union[OpError, _Mapping]] = ..., incarnation: _Optional[bytes] = ...) -> None: ...

class CasRequest(_message.Message):
    __slots__ = ("key", "new", "expect_incarnation")
    KEY_FIELD_NUMBER: _ClassVar[int]
    NEW_FIELD_NUMBER: _ClassVar[int]
    EXPECT_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    key: str
    new: Versioned
    expect_incarnation: bytes
    def __init__(self, key: _Optional[str] = ..., new: _Optional[_Union[Versioned, _Mapping]] = ..., expect_incarnation: _Optional[bytes] = ...) -> None: ...

class CasOk(_message.Message):
    __slots__ = ("committed",)
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    committed: bool
    def __init__(self, committed: _Optional[bool] = ...) -> None: ...

class CasResponse(_message.Message):
    __slots__ = ("ok", "err", "incarnation")
    OK_FIELD_NUMBER: _ClassVar[int]
    ERR_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ok: CasOk
    err: OpError
    incarnation: bytes
    def __init__(self, ok: _Optional[_Union[CasOk, _Mapping]] = ..., err: _Optional[_Union[OpError, _Mapping]] = ..., incarnation: _Optional[bytes] = ...) -> None: ...

class CasItem(_message.Message):
    __slots__ = ("key", "new", "continued")
    KEY_FIELD_NUMBER: _ClassVar[int]
    NEW_FIELD_NUMBER: _ClassVar[int]
    CONTINUED_FIELD_NUMBER: _ClassVar[int]
    key: str
    new: Versioned
    continued: bool
    def __init__(self, key: _Optional[str] = ..., new: _Optional[_Union[Versioned, _Mapping]] = ..., continued: _Optional[bool] = ...) -> None: ...

class CasBatchRequest(_message.Message):
    __slots__ = ("items", "more", "bytes", "expect_incarnation")
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    EXPECT_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[CasItem]
    more: bool
    bytes: int
    expect_incarnation: bytes
    def __init__(self, items: _Optional[_Iterable[_Union[CasItem, _Mapping]]] = ..., more: _Optional[bool] = ..., bytes: _Optional[int] = ..., expect_incarnation: _Optional[bytes] = ...) -> None: ...

class CasOutcome(_message.Message):
    __slots__ = ("ok", "err")
    OK_FIELD_NUMBER: _ClassVar[int]
    ERR_FIELD_NUMBER: _ClassVar[int]
    ok: CasOk
    err: OpError
    def __init__(self, ok: _Optional[_Union[CasOk, _Mapping]] = ..., err: _Optional[_Union[OpError, _Mapping]] = ...) -> None: ...

class CasManyOk(_message.Message):
    __slots__ = ("outcomes",)
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    outcomes: _containers.RepeatedCompositeFieldContainer[CasOutcome]
    def __init__(self, outcomes: _Optional[_Iterable[_Union[CasOutcome, _Mapping]]] = ...) -> None: ...

class CasManyResponse(_message.Message):
    __slots__ = ("ok", "err", "incarnation")
    OK_FIELD_NUMBER: _ClassVar[int]
    ERR_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ok: CasManyOk
    err: OpError
    incarnation: bytes
    def __init__(self, ok: _Optional[_Union[CasManyOk, _Mapping]] = ..., err: _Optional[_Union[OpError, _Mapping]] = ..., incarnation: _Optional[bytes] = ...) -> None: ...

class ScanRequest(_message.Message):
    __slots__ = ("key", "limit", "expect_incarnation")
    KEY_FIELD_NUMBER: _ClassVar[int]
    FROM_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    EXPECT_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    key: str
    limit: int
    expect_incarnation: bytes
    def __init__(self, key: _Optional[str] = ..., limit: _Optional[int] = ..., expect_incarnation: _Optional[bytes] = ..., **kwargs) -> None: ...

class ScanOk(_message.Message):
    __slots__ = ("entries", "more")
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    entries: _containers.RepeatedCompositeFieldContainer[Versioned]
    more: bool
    def __init__(self, entries: _Optional[_Iterable[_Union[Versioned, _Mapping]]] = ..., more: _Optional[bool] = ...) -> None: ...

class ScanResponse(_message.Message):
    __slots__ = ("ok", "err", "incarnation")
    OK_FIELD_NUMBER: _ClassVar[int]
    ERR_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ok: ScanOk
    err: OpError
    incarnation: bytes
    def __init__(self, ok: _Optional[_Union[ScanOk, _Mapping]] = ..., err: _Optional[_Union[OpError, _Mapping]] = ..., incarnation: _Optional[bytes] = ...) -> None: ...

class SnapshotRequest(_message.Message):
    __slots__ = ("prefix", "position", "revision", "expect_incarnation")
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    EXPECT_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    prefix: str
    position: Position
    revision: int
    expect_incarnation: bytes
    def __init__(self, prefix: _Optional[str] = ..., position: _Optional[_Union[Position, _Mapping]] = ..., revision: _Optional[int] = ..., expect_incarnation: _Optional[bytes] = ...) -> None: ...

class Position(_message.Message):
    __slots__ = ("key", "seqno")
    KEY_FIELD_NUMBER: _ClassVar[int]
    SEQNO_FIELD_NUMBER: _ClassVar[int]
    key: str
    seqno: int
    def __init__(self, key: _Optional[str] = ..., seqno: _Optional[int] = ...) -> None: ...

class SnapshotOk(_message.Message):
    __slots__ = ("entries", "revision", "more")
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    entries: _containers.RepeatedCompositeFieldContainer[CasItem]
    revision: int
    more: bool
    def __init__(self, entries: _Optional[_Iterable[_Union[CasItem, _Mapping]]] = ..., revision: _Optional[int] = ..., more: _Optional[bool] = ...) -> None: ...

class SnapshotResponse(_message.Message):
    __slots__ = ("ok", "err", "incarnation")
    OK_FIELD_NUMBER: _ClassVar[int]
    ERR_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ok: SnapshotOk
    err: OpError
    incarnation: bytes
    def __init__(self, ok: _Optional[_Union[SnapshotOk, _Mapping]] = ..., err: _Optional[_Union[OpError, _Mapping]] = ..., incarnation: _Optional[bytes] = ...) -> None: ...

class TruncateRequest(_message.Message):
    __slots__ = ("key", "seqno", "expect_incarnation")
    KEY_FIELD_NUMBER: _ClassVar[int]
    SEQNO_FIELD_NUMBER: _ClassVar[int]
    EXPECT_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    key: str
    seqno: int
    expect_incarnation: bytes
    def __init__(self, key: _Optional[str] = ..., seqno: _Optional[int] = ..., expect_incarnation: _Optional[bytes] = ...) -> None: ...

class TruncateOk(_message.Message):
    __slots__ = ("deleted",)
    DELETED_FIELD_NUMBER: _ClassVar[int]
    deleted: int
    def __init__(self, deleted: _Optional[int] = ...) -> None: ...

class TruncateResponse(_message.Message):
    __slots__ = ("ok", "err", "incarnation")
    OK_FIELD_NUMBER: _ClassVar[int]
    ERR_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ok: TruncateOk
    err: OpError
    incarnation: bytes
    def __init__(self, ok: _Optional[_Union[TruncateOk, _Mapping]] = ..., err: _Optional[_Union[OpError, _Mapping]] = ..., incarnation: _Optional[bytes] = ...) -> None: ...

class ListKeysRequest(_message.Message):
    __slots__ = ("prefix", "after", "expect_incarnation")
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    EXPECT_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    prefix: str
    after: str
    expect_incarnation: bytes
    def __init__(self, prefix: _Optional[str] = ..., after: _Optional[str] = ..., expect_incarnation: _Optional[bytes] = ...) -> None: ...

class ListKeysOk(_message.Message):
    __slots__ = ("keys", "more")
    KEYS_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    keys: _containers.RepeatedScalarFieldContainer[str]
    more: bool
    def __init__(self, keys: _Optional[_Iterable[str]] = ..., more: _Optional[bool] = ...) -> None: ...

class ListKeysResponse(_message.Message):
    __slots__ = ("ok", "err", "incarnation")
    OK_FIELD_NUMBER: _ClassVar[int]
    ERR_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ok: ListKeysOk
    err: OpError
    incarnation: bytes
    def __init__(self, ok: _Optional[_Union[ListKeysOk, _Mapping]] = ..., err: _Optional[_Union[OpError, _Mapping]] = ..., incarnation: _Optional[bytes] = ...) -> None: ...

class SubscribeRequest(_message.Message):
    __slots__ = ("key", "expect_incarnation")
    KEY_FIELD_NUMBER: _ClassVar[int]
    FROM_FIELD_NUMBER: _ClassVar[int]
    EXPECT_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    key: str
    expect_incarnation: bytes
    def __init__(self, key: _Optional[str] = ..., expect_incarnation: _Optional[bytes] = ..., **kwargs) -> None: ...

class SubscribeEvent(_message.Message):
    __slots__ = ("entry", "caught_up", "resync", "heartbeat", "err", "incarnation")
    ENTRY_FIELD_NUMBER: _ClassVar[int]
    CAUGHT_UP_FIELD_NUMBER: _ClassVar[int]
    RESYNC_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    ERR_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    entry: Versioned
    caught_up: CaughtUp
    resync: Resync
    heartbeat: Heartbeat
    err: OpError
    incarnation: bytes
    def __init__(self, entry: _Optional[_Union[Versioned, _Mapping]] = ..., caught_up: _Optional[_Union[CaughtUp, _Mapping]] = ..., resync: _Optional[_Union[Resync, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., err: _Optional[_Union[OpError, _Mapping]] = ..., incarnation: _Optional[bytes] = ...) -> None: ...

class CaughtUp(_message.Message):
    __slots__ = ("seqno",)
    SEQNO_FIELD_NUMBER: _ClassVar[int]
    seqno: int
    def __init__(self, seqno: _Optional[int] = ...) -> None: ...

class Resync(_message.Message):
    __slots__ = ("floor", "head", "reason")
    FLOOR_FIELD_NUMBER: _ClassVar[int]
    HEAD_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    floor: int
    head: int
    reason: str
    def __init__(self, floor: _Optional[int] = ..., head: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("head",)
    HEAD_FIELD_NUMBER: _ClassVar[int]
    head: int
    def __init__(self, head: _Optional[int] = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("prefix", "from_revision", "expect_incarnation")
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    FROM_REVISION_FIELD_NUMBER: _ClassVar[int]
    EXPECT_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    prefix: str
    from_revision: int
    expect_incarnation: bytes
    def __init__(self, prefix: _Optional[str] = ..., from_revision: _Optional[int] = ..., expect_incarnation: _Optional[bytes] = ...) -> None: ...

class WatchEvent(_message.Message):
    __slots__ = ("entries", "progress", "resync", "err", "incarnation")
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    RESYNC_FIELD_NUMBER: _ClassVar[int]
    ERR_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    entries: Entries
    progress: int
    resync: WatchResync
    err: OpError
    incarnation: bytes
    def __init__(self, entries: _Optional[_Union[Entries, _Mapping]] = ..., progress: _Optional[int] = ..., resync: _Optional[_Union[WatchResync, _Mapping]] = ..., err: _Optional[_Union[OpError, _Mapping]] = ..., incarnation: _Optional[bytes] = ...) -> None: ...

class Entries(_message.Message):
    __slots__ = ("revision", "entries")
    REVISION_FIELD_NUMBER: _ClassVar[int]
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    revision: int
    entries: _containers.RepeatedCompositeFieldContainer[CasItem]
    def __init__(self, revision: _Optional[int] = ..., entries: _Optional[_Iterable[_Union[CasItem, _Mapping]]] = ...) -> None: ...

class WatchResync(_message.Message):
    __slots__ = ("revision", "heads", "reason")
    class HeadsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    REVISION_FIELD_NUMBER: _ClassVar[int]
    HEADS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    revision: int
    heads: _containers.ScalarMap[str, int]
    reason: str
    def __init__(self, revision: _Optional[int] = ..., heads: _Optional[_Mapping[str, int]] = ..., reason: _Optional[str] = ...) -> None: ...

class SessionRequest(_message.Message):
    __slots__ = ("first", "cas_key", "cas_seqno", "cas_data", "head_key", "head_fresh", "expect_incarnation")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    CAS_KEY_FIELD_NUMBER: _ClassVar[int]
    CAS_SEQNO_FIELD_NUMBER: _ClassVar[int]
    CAS_DATA_FIELD_NUMBER: _ClassVar[int]
    HEAD_KEY_FIELD_NUMBER: _ClassVar[int]
    HEAD_FRESH_FIELD_NUMBER: _ClassVar[int]
    EXPECT_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    first: int
    cas_key: _containers.RepeatedScalarFieldContainer[str]
    cas_seqno: _containers.RepeatedScalarFieldContainer[int]
    cas_data: _containers.RepeatedScalarFieldContainer[bytes]
    head_key: _containers.RepeatedScalarFieldContainer[str]
    head_fresh: _containers.RepeatedScalarFieldContainer[bool]
    expect_incarnation: bytes
    def __init__(self, first: _Optional[int] = ..., cas_key: _Optional[_Iterable[str]] = ..., cas_seqno: _Optional[_Iterable[int]] = ..., cas_data: _Optional[_Iterable[bytes]] = ..., head_key: _Optional[_Iterable[str]] = ..., head_fresh: _Optional[_Iterable[bool]] = ..., expect_incarnation: _Optional[bytes] = ...) -> None: ...

class SessionResponse(_message.Message):
    __slots__ = ("committed", "mismatched", "failed", "errors", "found", "heads", "absent", "err", "window", "incarnation")
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    MISMATCHED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    ERRORS_FIELD_NUMBER: _ClassVar[int]
    FOUND_FIELD_NUMBER: _ClassVar[int]
    HEADS_FIELD_NUMBER: _ClassVar[int]
    ABSENT_FIELD_NUMBER: _ClassVar[int]
    ERR_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    committed: _containers.RepeatedScalarFieldContainer[int]
    mismatched: _containers.RepeatedScalarFieldContainer[int]
    failed: _containers.RepeatedScalarFieldContainer[int]
    errors: _containers.RepeatedCompositeFieldContainer[OpError]
    found: _containers.RepeatedScalarFieldContainer[int]
    heads: _containers.RepeatedCompositeFieldContainer[Versioned]
    absent: _containers.RepeatedScalarFieldContainer[int]
    err: OpError
    window: int
    incarnation: bytes
    def __init__(self, committed: _Optional[_Iterable[int]] = ..., mismatched: _Optional[_Iterable[int]] = ..., failed: _Optional[_Iterable[int]] = ..., errors: _Optional[_Iterable[_Union[OpError, _Mapping]]] = ..., found: _Optional[_Iterable[int]] = ..., heads: _Optional[_Iterable[_Union[Versioned, _Mapping]]] = ..., absent: _Optional[_Iterable[int]] = ..., err: _Optional[_Union[OpError, _Mapping]] = ..., window: _Optional[int] = ..., incarnation: _Optional[bytes] = ...) -> None: ...
