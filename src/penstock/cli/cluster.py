"""`penstock cluster`: run what controllers say, on and on."""

from __future__ import annotations

import contextlib
import dataclasses
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, TypeAlias

import typer

from penstock.cli import child
from penstock.cli.frame import print_json, stdout
from penstock.cli.hosting import deployed, finishing, print_transaction, spark, world_of
from penstock.cli.run import administered
from penstock.cli.stopping import stops
from penstock.cli.stores import opened
from penstock.errors import UsageError
from penstock.model.domain import Domain
from penstock.settings import Settings

if TYPE_CHECKING:
    from penstock.cluster.split import Split
    from penstock.cluster.unified import Unified
    from penstock.servicekit.children import Child
    from penstock.servicekit.rpc.grpcio import grpc
    from penstock.servicekit.rpc.tokens import TokenFile

    Protection: TypeAlias = tuple[TokenFile | None, grpc.ServerCredentials | None]

LISTEN: Final = "127.0.0.1:7100"
ADMIN_PORT: Final = 7180


UnifiedRuntime = Annotated[
    bool,
    typer.Option(
        "--unified-runtime/--no-unified-runtime",
        help="One process with one Spark, or one for each domain.",
    ),
]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ClusterOptions:
    """Where controllers connect, and how that is protected, which loopback does not need."""

    listen: str = LISTEN
    admin_port: int = ADMIN_PORT
    install: bool = False
    unified: bool = True
    token_file: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_client_ca: Path | None = None

    def __post_init__(self) -> None:
        from penstock.cluster.service import check_exposure
        from penstock.servicekit.rpc.listener import check_certificate

        check_certificate(self.tls_cert, self.tls_key)
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise UsageError("--tls-client-ca needs --tls-cert and --tls-key")
        check_exposure(
            self.listen, tls=self.tls_cert is not None, tokens=self.token_file is not None
        )

    def protection(self) -> Protection:
        """Read the files; `UsageError` if they cannot be used."""
        from penstock.servicekit.rpc.listener import open_tokens, server_credentials

        tokens = open_tokens(self.token_file)
        return tokens, server_credentials(self.tls_cert, self.tls_key, self.tls_client_ca)


def cluster(
    settings: Settings,
    listen: Annotated[
        str,
        typer.Option(
            "--listen", help="HOST:PORT for controllers, port 0 takes a free one; or unix:/PATH."
        ),
    ] = LISTEN,
    admin_port: Annotated[
        int,
        typer.Option(
            "--admin-port",
            min=0,
            max=65_535,
            help="Serve the state of tasks as JSON on this loopback port; 0 takes a free one.",
        ),
    ] = ADMIN_PORT,
    install: Annotated[
        bool,
        typer.Option("--install", help="First install the packages that derivations import."),
    ] = False,
    unified_runtime: UnifiedRuntime = True,
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
    domain: Annotated[Domain | None, typer.Option("--domain", hidden=True)] = None,
    claim: Annotated[int, typer.Option("--claim", hidden=True)] = 0,
) -> None:
    """Run the tasks that a controller asks for, until SIGTERM or Ctrl-C.

    penstock up is a cluster with a controller inside. This one has none: it runs what the last
    penstock controller asked for, and controllers may come and go. What is to run is kept in the
    consensus store, so it survives restarts of both.

    Prints one line with its address on stdout once controllers can connect. The newest cluster of a
    deployment takes over, and the previous one ends.

    --no-unified-runtime runs captures and materializations in one process and derivations in
    another, each with its own Spark: a failure of one does not affect the other, but it takes more
    memory.

    Example: penstock cluster --consensus grpc://127.0.0.1:6882
    """
    options = ClusterOptions(
        listen=listen,
        admin_port=admin_port,
        install=install,
        unified=unified_runtime,
        token_file=token_file,
        tls_cert=tls_cert,
        tls_key=tls_key,
        tls_client_ca=tls_client_ca,
    )
    if (domain is None) != (claim == 0):
        raise UsageError(
            "--domain and --claim are for the processes of --no-unified-runtime",
            fix="leave them out; penstock cluster --no-unified-runtime starts a process for each",
        )
    if domain is not None:
        stops.run(_half(settings, options, domain, claim))
    elif options.unified:
        stops.run(_cluster(settings, options))
    else:
        stops.run(_split(settings, options))


async def _cluster(settings: Settings, options: ClusterOptions) -> None:
    """Both domains, in this process."""
    from penstock.cluster.unified import Unified
    from penstock.deployment import is_taken_over

    protection = options.protection()
    async with deployed(settings, command="cluster", create=True) as store:
        world = await world_of(settings, store, install=options.install)
        unified = Unified(
            world,
            on_progress=print_transaction,
            is_lent=lambda: is_taken_over(settings),
            controlled=True,
        )
        await _serve(settings, options, protection, unified, spark(settings, world, unified.stop))
        stops.ends_with(0)


async def _split(settings: Settings, options: ClusterOptions) -> None:
    """A process for each domain, and this one for controllers."""
    from penstock.cluster.split import Split

    def half(domain: Domain, claim: int) -> Child:
        arguments = ["--domain", domain.value, "--claim", str(claim), "--admin-port", "0"]
        if options.install and domain is Domain.COMPUTE:
            arguments.append("--install")
        return child.command(f"the {domain} domain", settings, "cluster", *arguments)

    protection = options.protection()
    async with deployed(settings, command="cluster", create=True) as store:
        split = Split(store, half)
        await _serve(settings, options, protection, split, contextlib.nullcontext())
        stops.ends_with(0)


async def _serve(
    settings: Settings,
    options: ClusterOptions,
    protection: Protection,
    host: Unified | Split,
    beside: AbstractAsyncContextManager[None],
) -> None:
    """Take what controllers say, and do it, until stopped.

    `beside` begins when the addresses are ours: what fails at once starts no Spark.
    """
    from penstock.cluster.service import ClusterService, serving

    tokens, credentials = protection
    service = ClusterService(host.sessions, tokens=tokens)
    async with (
        administered(host.relations(), options.admin_port) as admin,
        serving(
            service, listen=options.listen, credentials=credentials, before=host.claim
        ) as address,
        beside,
    ):
        _announce(address, admin, as_json=settings.json)
        with finishing(host.stop):
            await host.run()


async def _half(settings: Settings, options: ClusterOptions, domain: Domain, claim: int) -> None:
    """One domain, as a child of the process that has the claim."""
    from penstock.cluster.unified import Unified
    from penstock.deployment import is_taken_over

    async with contextlib.AsyncExitStack() as stack:
        store = await stack.enter_async_context(opened(settings))
        world = await world_of(settings, store, install=options.install)
        unified = Unified(
            world,
            on_progress=print_transaction,
            is_lent=lambda: is_taken_over(settings),
            controlled=True,
            domains=(domain,),
            claim=claim,
        )
        page = administered(unified.relations(), options.admin_port)
        admin = await stack.enter_async_context(page)
        # One of both is enough for other commands.
        shared = domain is Domain.STORAGE
        await stack.enter_async_context(spark(settings, world, unified.stop, shared=shared))
        stdout.print(f"the {domain} domain admin {admin}", markup=False)
        stdout.file.flush()
        with stops.finishing(unified.stop):
            await unified.run()
        stops.ends_with(0)


def _announce(address: str, admin: str, *, as_json: bool) -> None:
    if as_json:
        print_json({"listening": address, "admin": admin})
    else:
        stdout.print(f"cluster listening on {address} admin {admin}", markup=False)
    stdout.file.flush()
