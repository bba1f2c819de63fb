"""Both ends of the shuffle service, as `penstock shuffle` is asked for them.

penstock shuffle --listen 127.0.0.1:7070
penstock shuffle --from grpc://127.0.0.1:7070 --name acme/views
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.cli.frame import print_json, stdout
from penstock.cli.stopping import stops
from penstock.cli.stores import current_catalog, opened
from penstock.errors import UsageError
from penstock.settings import Settings

if TYPE_CHECKING:
    from penstock.servicekit.rpc.address import ServiceAddress
    from penstock.shuffle.binding import Binding


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Listening:
    """The address where sessions are served, and its protection, which loopback does not need."""

    listen: str
    token_file: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None

    def __post_init__(self) -> None:
        from penstock.servicekit.rpc.listener import check_certificate
        from penstock.shuffle.service import check_exposure

        check_certificate(self.tls_cert, self.tls_key)
        check_exposure(
            self.listen, tls=self.tls_cert is not None, tokens=self.token_file is not None
        )


def service_address(
    url: str, *, token_file: Path | None = None, tls_ca: Path | None = None
) -> ServiceAddress:
    """Return the service that --from names, with the options given beside its URL."""
    from penstock.servicekit.rpc.address import ServiceAddress
    from penstock.servicekit.rpc.channel import check_clear

    address = ServiceAddress.parse(url)
    for option, given, named in (
        ("--token-file", token_file, address.token_file),
        ("--tls-ca", tls_ca, address.ca),
    ):
        if given is not None and named is not None:
            raise UsageError(f"{option} is given, and in the URL of --from as well")
    address = dataclasses.replace(
        address,
        token_file=token_file or address.token_file,
        ca=tls_ca or address.ca,
        tls=address.tls or tls_ca is not None,
    )
    check_clear(address)
    return address


def refuse_beside(choice: str, options: Mapping[str, object], why: str) -> None:
    """Refuse `options` that were given but mean nothing beside `choice`."""
    if given := [option for option, value in options.items() if value]:
        raise UsageError(f"{choice} does not go together with {' and '.join(given)}", why=why)


def refuse_without_service(options: Mapping[str, object]) -> None:
    """Refuse `options` that were given but mean nothing without a service."""
    if given := [option for option, value in options.items() if value]:
        raise UsageError(
            f"{' and '.join(given)} without a service",
            fix="add --listen HOST:PORT to be one, or --from grpc://HOST:PORT to ask one",
        )


def serve(settings: Settings, listening: Listening) -> None:
    """Serve sessions until SIGTERM or Ctrl-C."""
    stops.run(_serve(settings, listening))


async def _serve(settings: Settings, listening: Listening) -> None:
    from penstock import wall_clock
    from penstock.catalog import desired
    from penstock.journal.blobs import open_blobs
    from penstock.journal.journals import Journals
    from penstock.journal.planning import Planner
    from penstock.journal.schemas import Schemas
    from penstock.servicekit.rpc.listener import open_tokens, server_credentials
    from penstock.servicekit.signals import at_stop_signals
    from penstock.shuffle.binding import task_bindings
    from penstock.shuffle.service import ShuffleService, serving

    tokens = open_tokens(listening.token_file)
    credentials = server_credentials(listening.tls_cert, listening.tls_key, None)
    async with opened(settings, create=bool(settings.catalog)) as store:
        await current_catalog(store, settings)

        async def resolve(name: str) -> Sequence[Binding]:
            """By the catalog as it is when a session opens: it may have been applied since."""
            return task_bindings(await desired.load(store), name)

        planner = Planner(
            journals=Journals(store), blobs=open_blobs(settings.blob), schemas=Schemas(store)
        )
        service = ShuffleService(planner, resolve, now=wall_clock.now, tokens=tokens)
        stopping = asyncio.Event()
        at_stop_signals(stopping.set)
        async with serving(service, listen=listening.listen, credentials=credentials) as address:
            _announce(address, as_json=settings.json)
            await stopping.wait()


def _announce(address: str, *, as_json: bool) -> None:
    if as_json:
        print_json({"listening": address})
    else:
        stdout.print(f"shuffle listening on {address}", markup=False)
    stdout.file.flush()
