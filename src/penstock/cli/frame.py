"""What every command shares: common options, output, exit codes and how errors print.

A command is a plain function whose first parameter is `settings`; `register` adds the common
options to its signature and wraps it. Results go to stdout, everything else to stderr.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from penstock import failpoints
from penstock.cli.stopping import stops
from penstock.errors import PenstockError
from penstock.servicekit import logs
from penstock.servicekit.secrets import mask
from penstock.settings import LOG_LEVELS, Settings

INTERRUPTED = 130
_PANEL = "Common options"

stdout = Console(soft_wrap=True, highlight=False)
stderr = Console(stderr=True, soft_wrap=True, highlight=False)


def _option(names: str, text: str, variable: str | None = None) -> Any:  # noqa: ANN401 - typer's own
    suffix = f" [env: {variable}]" if variable else ""
    return typer.Option(*names.split(), help=text + suffix, rich_help_panel=_PANEL)


_COMMON: Mapping[str, tuple[Any, Any]] = {
    "data": (
        Annotated[Path | None, _option("--data", "Data directory (./.penstock).", "PENSTOCK_DATA")],
        None,
    ),
    "consensus": (
        Annotated[
            str | None,
            _option(
                "--consensus",
                "Consensus store: sqlite:///FILE (default, in the data directory), postgresql://…, "
                "or grpc://HOST:PORT for a committer.",
                "PENSTOCK_CONSENSUS",
            ),
        ],
        None,
    ),
    "blob": (
        Annotated[
            str | None,
            _option("--blob", "Blob store (a directory, s3://…, gs://…).", "PENSTOCK_BLOB"),
        ],
        None,
    ),
    "catalog": (
        Annotated[
            list[Path] | None,
            _option("--catalog", "Apply this catalog first; repeatable.", "PENSTOCK_CATALOG"),
        ],
        None,
    ),
    "master": (
        Annotated[str | None, _option("--master", "Spark master (local[*]).", "PENSTOCK_MASTER")],
        None,
    ),
    "conf": (
        Annotated[list[str] | None, _option("--conf", "Spark setting key=value; repeatable.")],
        None,
    ),
    "log_level": (
        Annotated[
            str | None,
            _option("--log-level", f"One of {', '.join(LOG_LEVELS)}.", "PENSTOCK_LOG_LEVEL"),
        ],
        None,
    ),
    "log_json": (
        Annotated[
            bool | None,
            _option("--log-json", "Logs as JSON lines.", "PENSTOCK_LOG_JSON"),
        ],
        None,
    ),
    "json": (Annotated[bool | None, _option("--json", "Results as JSON on stdout.")], None),
    "debug": (
        Annotated[bool | None, _option("--debug", "Show stack traces, log everything.")],
        None,
    ),
}


def register(app: typer.Typer, function: Callable[..., None], name: str | None = None) -> None:
    """Add `function` to `app` as a command with the common options behind its own."""
    signature = inspect.signature(function, eval_str=True)
    own = [p for p in signature.parameters.values() if p.name != "settings"]
    common = [
        inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY, default=d, annotation=a)
        for n, (a, d) in _COMMON.items()
        if n not in signature.parameters
    ]

    @functools.wraps(function)
    def run(**arguments: Any) -> None:  # noqa: ANN401
        flags = {n: arguments.pop(n) for n in _COMMON if n not in signature.parameters}
        with _reporting(debug=bool(flags["debug"])):
            settings = Settings.resolve(flags, os.environ, _directories(arguments, flags))
            logs.configure(
                level="debug" if settings.debug else settings.log_level, as_json=settings.log_json
            )
            failpoints.arm(settings.failpoint)
            function(settings, **arguments)

    run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own] + common
    )
    app.command(name or function.__name__.replace("_", "-"))(run)


def _directories(arguments: Mapping[str, Any], flags: Mapping[str, Any]) -> list[Path]:
    """Where penstock.toml may lie: beside the catalogs that were given, then here."""
    catalogs = [*(arguments.get("catalogs") or []), *(flags.get("catalog") or [])]
    return [*dict.fromkeys(Path(c).parent for c in catalogs), Path()]


@contextlib.contextmanager
def _reporting(*, debug: bool) -> Iterator[None]:
    """Turn what goes wrong into a message and an exit code; the stack shows only on request."""
    try:
        yield
    except (typer.Exit, typer.Abort):
        raise
    except KeyboardInterrupt as e:
        raise typer.Exit(stops.code or INTERRUPTED) from e
    except BrokenPipeError as e:
        # The reader went away (`penstock … | head`): stop quietly, flush nothing more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit from e
    except PenstockError as e:
        _report(str(e), debug=debug)
        raise typer.Exit(e.exit_code) from e
    except Exception as e:
        _report(f"internal error: {type(e).__name__}: {e}", debug=debug)
        if not debug:
            stderr.print("  fix   run it again with --debug, and report what it prints")
        raise typer.Exit(1) from e


def _report(text: str, *, debug: bool) -> None:
    """Everything that is said of an error, the whole chain of it included, is masked."""
    stderr.print(mask(f"penstock: {text}"), markup=False)
    if debug:
        sys.stderr.write(mask(traceback.format_exc()))


def print_json(value: object) -> None:
    """One JSON value on stdout, as every `--json` result."""
    sys.stdout.write(json.dumps(value, ensure_ascii=False, indent=2) + "\n")
