"""`penstock persistd`: the standalone committer."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.frame import print_json, stdout
from penstock.cli.stopping import stops
from penstock.errors import UsageError
from penstock.settings import Settings

_UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_UNITS_BYTES = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_QUANTITY = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]+)")


def seconds(text: str, option: str) -> float:
    """Parse a duration with its unit: a bare number could mean any."""
    return _quantity(text, option, _UNITS_S, "30s")


def size(text: str, option: str) -> int:
    """Parse a number of bytes with its unit."""
    return int(_quantity(text, option, dict(_UNITS_BYTES), "256MiB"))


def message_bytes(text: str) -> int:
    """Parse the limit of a message, which must not be below what every client may send."""
    from penstock.servicekit.rpc.listener import MESSAGE_BYTES

    if (limit := size(text, "--max-message-bytes")) < MESSAGE_BYTES:
        raise UsageError(
            f"--max-message-bytes {text} is less than clients send", fix="write 1MiB or more"
        )
    return limit


def _quantity(text: str, option: str, units: dict[str, float], example: str) -> float:
    match = _QUANTITY.fullmatch(text.strip())
    if match is None or match[2] not in units:
        raise UsageError(
            f"{option} {text!r} is not a number with a unit",
            fix=f"write for example {option} {example}; units are {', '.join(units)}",
        )
    return float(match[1]) * units[match[2]]


def persistd(
    settings: Settings,
    listen: Annotated[
        str,
        typer.Option(
            "--listen", help="HOST:PORT for clients, port 0 takes a free one; or unix:/PATH."
        ),
    ] = "127.0.0.1:6882",
    admin_port: Annotated[
        int,
        typer.Option(
            "--admin-port",
            "--metrics-port",
            min=0,
            max=65_535,
            help="Loopback port of /metrics, /healthz and /readyz; 0 takes a free one.",
        ),
    ] = 6883,
    max_connections: Annotated[
        int, typer.Option("--max-connections", min=1, help="Connections to the database.")
    ] = 8,
    commit_connections: Annotated[
        int, typer.Option("--commit-connections", min=0, help="Connections reserved for commits.")
    ] = 2,
    cache: Annotated[
        bool | None,
        typer.Option(
            "--cache/--no-cache", help="Answer heads from memory; the default for PostgreSQL."
        ),
    ] = None,
    max_cached_shards: Annotated[
        int, typer.Option("--max-cached-shards", min=0, help="Most heads kept in memory.")
    ] = 10_000,
    max_cached_bytes: Annotated[
        str, typer.Option("--max-cached-bytes", help="Most bytes kept in memory.")
    ] = "256MiB",
    coalesce_max_batch: Annotated[
        int,
        typer.Option(
            "--coalesce-max-batch", min=0, help="Appends per transaction; 0: one at a time."
        ),
    ] = 128,
    coalesce_concurrency: Annotated[
        int | None,
        typer.Option("--coalesce-concurrency", min=1, help="Transactions at once."),
    ] = None,
    max_entry_bytes: Annotated[
        str, typer.Option("--max-entry-bytes", help="Largest entry that is accepted.")
    ] = "64MiB",
    max_inflight: Annotated[
        int, typer.Option("--max-inflight", min=4, help="Operations in progress at once.")
    ] = 1_024,
    max_queue_per_key: Annotated[
        int,
        typer.Option(
            "--max-queue-per-key", min=1, help="Most compare-and-sets that wait for one key."
        ),
    ] = 64,
    max_queue_bytes: Annotated[
        str, typer.Option("--max-queue-bytes", help="Payload of all operations in progress.")
    ] = "64MiB",
    max_message_bytes: Annotated[
        str, typer.Option("--max-message-bytes", help="Largest message of a client; 1MiB or more.")
    ] = "1MiB",
    max_batch: Annotated[
        int, typer.Option("--max-batch", min=1_000, help="Operations in one batch of a client.")
    ] = 1_000,
    max_sessions: Annotated[
        int, typer.Option("--max-sessions", min=1, help="Open sessions: one per client process.")
    ] = 4_096,
    max_calls: Annotated[int, typer.Option("--max-calls", min=1, help="Calls at once.")] = 2_048,
    max_subscribers: Annotated[
        int, typer.Option("--max-subscribers", min=1, help="Open subscriptions and watches.")
    ] = 10_000,
    max_catch_ups: Annotated[
        int,
        typer.Option(
            "--max-catch-ups", min=1, help="Subscriptions that read the database at once."
        ),
    ] = 4,
    max_unread_bytes: Annotated[
        str, typer.Option("--max-unread-bytes", help="Answers that clients have not read yet.")
    ] = "128MiB",
    max_session_unread_bytes: Annotated[
        str, typer.Option("--max-session-unread-bytes", help="Unread heads of one session.")
    ] = "1MiB",
    request_timeout: Annotated[
        str, typer.Option("--request-timeout", help="Time for a message of a call to arrive.")
    ] = "30s",
    slow_reader_timeout: Annotated[
        str,
        typer.Option("--slow-reader-timeout", help="Time for a client to read what it was sent."),
    ] = "60s",
    stats_heartbeat_interval: Annotated[
        str,
        typer.Option(
            "--stats-heartbeat-interval", help="Time between stats lines; 0s turns them off."
        ),
    ] = "30s",
    token_file: Annotated[
        Path | None,
        typer.Option("--token-file", help="Lines of: NAME CAPABILITIES PREFIX|* SHA256."),
    ] = None,
    tls_cert: Annotated[Path | None, typer.Option("--tls-cert", help="PEM certificate.")] = None,
    tls_key: Annotated[Path | None, typer.Option("--tls-key", help="PEM key.")] = None,
    tls_client_ca: Annotated[
        Path | None,
        typer.Option("--tls-client-ca", help="Require client certificates issued by this CA."),
    ] = None,
    insecure_allow_plaintext: Annotated[
        bool,
        typer.Option(
            "--insecure-allow-plaintext",
            help="Listen beyond loopback without TLS and tokens.",
        ),
    ] = False,
    self_heal: Annotated[
        bool,
        typer.Option(
            "--self-heal/--no-self-heal",
            help="Recreate a dropped schema; otherwise exit with 3.",
        ),
    ] = True,
    check: Annotated[
        bool, typer.Option("--check", help="Open the database, report on it, and exit.")
    ] = False,
) -> None:
    """Serve the consensus store to other processes, over one pool of database connections.

    Waits for its database for as long as it takes. Prints one line with its address on stdout once
    clients can connect, and serves until SIGTERM.

    Example: penstock persistd --consensus postgresql://app@db/penstock --listen 127.0.0.1:6882
    """
    from penstock.consensus.backend import PoolOptions
    from penstock.consensus.coalesce import GroupCommitOptions
    from penstock.consensus.committer import persistd as daemon
    from penstock.consensus.committer.options import CommitterOptions, Limits

    options = daemon.PersistdOptions(
        consensus=settings.consensus,
        listen=listen,
        admin_port=admin_port,
        committer=CommitterOptions(
            cache=cache,
            cached_shards_max=max_cached_shards,
            cached_bytes_max=size(max_cached_bytes, "--max-cached-bytes"),
            entry_bytes_max=size(max_entry_bytes, "--max-entry-bytes"),
            group=GroupCommitOptions(
                elements_max=coalesce_max_batch, concurrency=coalesce_concurrency
            ),
            limits=Limits(
                inflight_max=max_inflight,
                queue_per_key_max=max_queue_per_key,
                queue_bytes_max=size(max_queue_bytes, "--max-queue-bytes"),
                subscribers_max=max_subscribers,
                sessions_max=max_sessions,
                calls_max=max_calls,
                message_bytes_max=message_bytes(max_message_bytes),
                batch_elements_max=max_batch,
                request_s=seconds(request_timeout, "--request-timeout"),
                unread_bytes_max=size(max_unread_bytes, "--max-unread-bytes"),
                session_unread_bytes_max=size(
                    max_session_unread_bytes, "--max-session-unread-bytes"
                ),
                slow_s=seconds(slow_reader_timeout, "--slow-reader-timeout"),
                catch_ups_max=max_catch_ups,
            ),
        ),
        pool=PoolOptions(connections_max=max_connections, commit_connections=commit_connections),
        stats_interval_s=seconds(stats_heartbeat_interval, "--stats-heartbeat-interval"),
        token_file=token_file,
        tls_cert=tls_cert,
        tls_key=tls_key,
        tls_client_ca=tls_client_ca,
        allow_plaintext=insecure_allow_plaintext,
        self_heal=self_heal,
    )

    def announce(bound: daemon.Bound) -> None:
        if settings.json:
            print_json({"listening": bound.address, "admin": bound.admin})
        else:
            stdout.print(f"persistd listening on {bound.address} admin {bound.admin}", markup=False)
        stdout.file.flush()

    if check:
        url, incarnation = stops.run(daemon.check(options))
        if settings.json:
            print_json({"consensus": url, "incarnation": incarnation.hex()})
        else:
            stdout.print(f"{url} is ready, store {incarnation.hex()}", markup=False)
        return
    daemon.run(options, announce)
