"""Options of a committer; the defaults are those of `penstock persistd`."""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.consensus.coalesce import GroupCommitOptions
from penstock.consensus.store import ENTRY_BYTES_MAX
from penstock.servicekit.rpc.listener import MESSAGE_BYTES

_CLIENT_SHARE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits on what may be under way at once."""

    inflight_max: int = 1_024
    """Operations in progress; one client over the network may hold a quarter of them."""
    queue_per_key_max: int = 64
    """Compare-and-sets of one key under way: they can only commit one after the other."""
    queue_bytes_max: int = 64 << 20
    """Payload bytes under way; a single larger operation is admitted when alone."""
    subscribers_max: int = 10_000
    """Open subscriptions and watches."""
    sessions_max: int = 4_096
    """Open sessions; every client process has one."""
    calls_max: int = 2_048
    """Calls under way, from the first byte of the request to the last of the answer."""
    message_bytes_max: int = MESSAGE_BYTES
    """Size of one message to the committer: gRPC reads no more of it."""
    batch_elements_max: int = 1_000
    """Operations in one batch, however many messages carry it; sessions have their window."""
    request_s: float = 30.0
    """How long one message of a call may take to arrive."""
    unread_bytes_max: int = 128 << 20
    """Answers and events that wait for their readers; one client may hold a quarter of them."""
    session_unread_bytes_max: int = 1 << 20
    """Of these, heads that wait in one session: past this it answers no further ones."""
    slow_s: float = 60.0
    """How long a client may take to read a message before its stream is ended."""
    catch_ups_max: int = 4
    """Subscriptions and watches that read the store at the same time."""

    def __post_init__(self) -> None:
        if self.message_bytes_max < MESSAGE_BYTES:
            raise ValueError(f"clients send messages of up to {MESSAGE_BYTES} bytes")

    @property
    def client_inflight_max(self) -> int:
        return max(1, self.inflight_max // _CLIENT_SHARE)

    @property
    def client_unread_bytes_max(self) -> int:
        return max(1, self.unread_bytes_max // _CLIENT_SHARE)


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamOptions:
    """Intervals of a stream, in seconds."""

    heartbeat_s: float = 10.0
    progress_s: float = 1.0
    slow_s: float = 60.0
    """A subscriber whose buffer overflowed and that took this long for one event must resync."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitterOptions:
    """What an operator may choose."""

    cache: bool | None = None
    """Answer heads from memory; None: as the backend's traits recommend."""
    cached_shards_max: int = 10_000
    cached_bytes_max: int = 256 << 20
    entry_bytes_max: int = ENTRY_BYTES_MAX
    group: GroupCommitOptions = field(default_factory=GroupCommitOptions)
    limits: Limits = field(default_factory=Limits)
    streams: StreamOptions = field(default_factory=StreamOptions)
    verify_s: float = 10.0
    """Interval between checks that the store is there and still the same one."""
