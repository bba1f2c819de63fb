from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ToCluster(_message.Message):
    __slots__ = ("hello", "put", "compact", "initialization_complete")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    PUT_FIELD_NUMBER: _ClassVar[int]
    COMPACT_FIELD_NUMBER: _ClassVar[int]
    INITIALIZATION_COMPLETE_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    put: Put
    compact: Compact
    initialization_complete: InitializationComplete
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., put: _Optional[_Union[Put, _Mapping]] = ..., compact: _Optional[_Union[Compact, _Mapping]] = ..., initialization_complete: _Optional[_Union[InitializationComplete, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("domain", "nonce", "holder", "protocol")
    DOMAIN_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    domain: str
    nonce: bytes
    holder: str
    protocol: int
    def __init__(self, domain: _Optional[str] = ..., nonce: _Optional[bytes] = ..., holder: _Optional[str] = ..., protocol: _Optional[int] = ...) -> None: ...

class Put(_message.Message):
    __slots__ = ("kind", "name", "digest")
    KIND_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    kind: str
    name: str
    digest: str
    def __init__(self, kind: _Optional[str] = ..., name: _Optional[str] = ..., digest: _Optional[str] = ...) -> None: ...

class Compact(_message.Message):
    __slots__ = ("id", "since")
    ID_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    id: str
    since: int
    def __init__(self, id: _Optional[str] = ..., since: _Optional[int] = ...) -> None: ...

class InitializationComplete(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FromCluster(_message.Message):
    __slots__ = ("opened", "done", "closed")
    OPENED_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    CLOSED_FIELD_NUMBER: _ClassVar[int]
    opened: Opened
    done: Done
    closed: Closed
    def __init__(self, opened: _Optional[_Union[Opened, _Mapping]] = ..., done: _Optional[_Union[Done, _Mapping]] = ..., closed: _Optional[_Union[Closed, _Mapping]] = ...) -> None: ...

class Opened(_message.Message):
    __slots__ = ("epoch", "digests")
    class DigestsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    digests: _containers.ScalarMap[str, str]
    def __init__(self, epoch: _Optional[int] = ..., digests: _Optional[_Mapping[str, str]] = ...) -> None: ...

class Done(_message.Message):
    __slots__ = ("seqno", "outcomes", "initialized")
    SEQNO_FIELD_NUMBER: _ClassVar[int]
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    INITIALIZED_FIELD_NUMBER: _ClassVar[int]
    seqno: int
    outcomes: _containers.RepeatedScalarFieldContainer[str]
    initialized: bool
    def __init__(self, seqno: _Optional[int] = ..., outcomes: _Optional[_Iterable[str]] = ..., initialized: _Optional[bool] = ...) -> None: ...

class Closed(_message.Message):
    __slots__ = ("reason", "detail")
    REASON_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    reason: str
    detail: str
    def __init__(self, reason: _Optional[str] = ..., detail: _Optional[str] = ...) -> None: ...
