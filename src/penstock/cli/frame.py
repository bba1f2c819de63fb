"""The frame of every command: common options, output, exit codes, and how errors print.

A command is a plain function whose first parameter is `settings`; `register` adds the common
options to its signature and wraps it. Results go to stdout, everything else to stderr.
"""

from __future__ import annotations

import contextlib
import copy
import difflib
import functools
import inspect
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, get_args

import typer
from rich.console import Console
from typer.core import TyperCommand, TyperGroup

from penstock import failpoints
from penstock.cli.stopping import stops
from penstock.errors import PenstockError
from penstock.servicekit import logs
from penstock.servicekit.secrets import mask
from penstock.settings import LOG_LEVELS, Settings
from penstock.warm.client import COMMANDS, OWN_SPARK, command_first

INTERRUPTED = 130
_PANEL = "Common options"
_ALIKE: Final = 0.7
"""How alike a command must be to what was typed, to be suggested."""

stdout = Console(soft_wrap=True, highlight=False)
stderr = Console(stderr=True, soft_wrap=True, highlight=False)


def look_at_terminal() -> None:
    """Look at the terminal and the environment again: a process that was forked has others."""
    Console.__init__(stdout, soft_wrap=True, highlight=False)
    Console.__init__(stderr, stderr=True, soft_wrap=True, highlight=False)


def _option(names: str, text: str, variable: str | None = None) -> Any:  # noqa: ANN401 - typer's own
    suffix = rf" \[env: {variable}]" if variable else ""
    return typer.Option(*names.split(), help=text + suffix, rich_help_panel=_PANEL)


_OWN_SPARK = inspect.Parameter(
    "own_spark",
    inspect.Parameter.KEYWORD_ONLY,
    default=False,
    annotation=Annotated[
        bool,
        typer.Option(OWN_SPARK, help="Start Spark instead of using that of a running process."),
    ],
)
"""For commands that may be run elsewhere. One that is run here has no other Spark to use."""

_COMMON: Mapping[str, tuple[Any, Any]] = {
    "data": (
        Annotated[
            Path | None, _option("--data", "Data directory (default ./.penstock).", "PENSTOCK_DATA")
        ],
        None,
    ),
    "consensus": (
        Annotated[
            str | None,
            _option(
                "--consensus",
                "Consensus store: sqlite:///FILE (default, in the data directory), postgresql://…, "
                "or grpc://HOST:PORT of a persistd.",
                "PENSTOCK_CONSENSUS",
            ),
        ],
        None,
    ),
    "blob": (
        Annotated[
            str | None,
            _option(
                "--blob",
                "Blob store: a directory (default, in the data directory), s3://… or gs://….",
                "PENSTOCK_BLOB",
            ),
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
        Annotated[
            str | None, _option("--master", "Spark master (default local\\[*]).", "PENSTOCK_MASTER")
        ],
        None,
    ),
    "conf": (
        Annotated[list[str] | None, _option("--conf", "Spark setting, as key=value; repeatable.")],
        None,
    ),
    "log_level": (
        Annotated[
            str | None,
            _option("--log-level", f"Log level: {', '.join(LOG_LEVELS)}.", "PENSTOCK_LOG_LEVEL"),
        ],
        None,
    ),
    "log_json": (
        Annotated[
            bool | None,
            _option("--log-json", "Log as JSON lines.", "PENSTOCK_LOG_JSON"),
        ],
        None,
    ),
    "json": (Annotated[bool | None, _option("--json", "Print results as JSON.")], None),
    "debug": (
        Annotated[bool | None, _option("--debug", "Show stack traces and log everything.")],
        None,
    ),
}


class HelpfulCommand(TyperCommand):
    """A command whose help names values as people do, not by their Python type."""

    _in_help = False

    def get_params(self, ctx: Any) -> list[Any]:  # noqa: ANN401 - typer's own
        found = [_plainly(each) for each in super().get_params(ctx)]
        return [*map(_first_name, found)] if self._in_help else found

    def format_help(self, ctx: Any, formatter: Any) -> None:  # noqa: ANN401
        self._in_help = True
        try:
            super().format_help(ctx, formatter)
        finally:
            self._in_help = False


class CommandGroup(TyperGroup):
    """Commands that take the common options before their name, too."""

    def get_params(self, ctx: Any) -> list[Any]:  # noqa: ANN401
        return [_plainly(each) for each in super().get_params(ctx)]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # noqa: ANN401
        return super().parse_args(ctx, command_first(args))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:  # noqa: ANN401
        if args[0] not in self.commands and not args[0].startswith("-"):
            ctx.fail(f"there is no command {args[0]!r}{self._suggestion(args[0])}")
        return super().resolve_command(ctx, args)

    def _suggestion(self, word: str) -> str:
        """Name the command that may have been meant, also one of a group; nothing if none fits."""
        known = {name: name for name in self.commands}
        for name, group in self.commands.items():
            for inner in getattr(group, "commands", ()):
                known.setdefault(inner, f"{name} {inner}")
        close = difflib.get_close_matches(word, known, n=1, cutoff=_ALIKE)
        return f"; did you mean {known[close[0]]!r}?" if close else ""


def _first_name(parameter: Any) -> Any:  # noqa: ANN401
    """Show one name of an option in the first column, so that it is never cut."""
    shown = copy.copy(parameter)
    if parameter.secondary_opts:
        shown.help = f"{parameter.help} {parameter.secondary_opts[0]} turns it off."
        shown.secondary_opts, shown.show_default = [], False
    if len(names := [name for name in parameter.opts if name.startswith("--")]) > 1:
        shown.opts = [name for name in parameter.opts if name not in names[1:]]
    return shown


def _plainly(parameter: Any) -> Any:  # noqa: ANN401
    """Let help show the name of a value alone: no Python type, and no range."""
    if parameter.param_type_name == "argument":
        parameter.display_type_rich = lambda ctx: None
        required, name = parameter.required, parameter.metavar
        parameter.get_usage_pieces = lambda _: [
            f"{name if required else f'[{name}]'}{'...' if parameter.nargs == -1 else ''}"
        ]
    elif parameter.metavar is None:
        parameter.metavar = ""  # --help and --version
    parameter._get_number_range_help_str = lambda: None  # noqa: SLF001 - it has no other switch
    return parameter


def register(
    app: typer.Typer,
    function: Callable[..., None],
    name: str | None = None,
    *,
    if_stopped: str = "nothing was changed",
) -> None:
    """Add `function` to `app` as a command, with the common options after its own.

    `if_stopped` says what became of it when Ctrl-C ends it; `stops.outcome` changes that later.
    """
    signature = inspect.signature(function, eval_str=True)
    own = [p for p in signature.parameters.values() if p.name != "settings"]
    name = name or function.__name__.replace("_", "-")
    if name in COMMANDS:
        own.append(_OWN_SPARK)

    @functools.wraps(function)
    def run(**arguments: Any) -> None:  # noqa: ANN401
        flags = {n: arguments.pop(n) for n in _COMMON if n not in signature.parameters}
        arguments.pop(_OWN_SPARK.name, None)
        stops.outcome = if_stopped
        with _reporting(debug=bool(flags["debug"])):
            settings = Settings.resolve(flags, os.environ, _directories(arguments, flags))
            logs.configure(
                level="debug" if settings.debug else settings.log_level, as_json=settings.log_json
            )
            failpoints.arm(settings.failpoint)
            function(settings, **arguments)

    run.__doc__ = _help_text(function)
    run.__signature__ = _with_common(own, signature.parameters)  # type: ignore[attr-defined]
    app.command(name, cls=HelpfulCommand)(run)


def with_common_options(function: Callable[..., None]) -> Callable[..., None]:
    """Let the help of all commands list the common options: `CommandGroup` passes them on."""
    own = inspect.signature(function, eval_str=True).parameters

    @functools.wraps(function)
    def run(**arguments: Any) -> None:  # noqa: ANN401
        function(**{name: value for name, value in arguments.items() if name in own})

    run.__signature__ = _with_common(own.values(), own)  # type: ignore[attr-defined]
    return run


def _with_common(
    own: Iterable[inspect.Parameter], taken: Mapping[str, inspect.Parameter]
) -> inspect.Signature:
    common = [
        inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY, default=d, annotation=a)
        for n, (a, d) in _COMMON.items()
        if n not in taken
    ]
    parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own] + common
    for parameter in parameters:
        _name_value(parameter)
    return inspect.Signature(parameters)


def _help_text(function: Callable[..., None]) -> str:
    """Join the lines of each paragraph of a docstring: the terminal's width decides on breaks."""
    paragraphs = inspect.cleandoc(function.__doc__ or "").split("\n\n")
    return "\n\n".join(p if "\n " in p else p.replace("\n", " ") for p in paragraphs)


def _name_value(parameter: inspect.Parameter) -> None:
    """Set how help names a parameter's value, where the command does not: typer shows a type."""
    kind, *infos = get_args(parameter.annotation) or (parameter.annotation,)
    for info in (info for info in infos if info.metavar is None):
        kinds = {kind, *get_args(kind)}
        if isinstance(info, typer.models.ArgumentInfo):
            info.metavar = parameter.name.upper().removesuffix("S")
        elif bool in kinds:
            info.metavar = ""
        else:
            paths = {Path, list[Path]}
            info.metavar = "PATH" if kinds & paths else "N" if kinds & {int, float} else "TEXT"


def _directories(arguments: Mapping[str, Any], flags: Mapping[str, Any]) -> list[Path]:
    """Return where penstock.toml may be: beside the given catalogs, then here."""
    catalogs = [*(arguments.get("catalogs") or []), *(flags.get("catalog") or [])]
    return [*dict.fromkeys(Path(c).parent for c in catalogs), Path()]


@contextlib.contextmanager
def _reporting(*, debug: bool) -> Iterator[None]:
    """Turn an error into a message and an exit code; --debug adds the stack trace."""
    try:
        yield
    except (typer.Exit, typer.Abort):
        raise
    except KeyboardInterrupt as e:
        stderr.file.flush()
        stops.tell()
        raise typer.Exit(stops.code or INTERRUPTED) from e
    except BrokenPipeError as e:
        # The reader is gone (`penstock … | head`): stop quietly, flush nothing more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit from e
    except PenstockError as e:
        _report(str(e), debug=debug)
        raise typer.Exit(e.exit_code) from e
    except Exception as e:
        _report(f"internal error: {type(e).__name__}: {e}", debug=debug)
        if not debug:
            stderr.print("  fix   run it again with --debug and report the output")
        raise typer.Exit(1) from e


def _report(text: str, *, debug: bool) -> None:
    """Print an error, with secrets masked in all of it, the stack trace included."""
    stderr.print(mask(f"penstock: {text}"), markup=False)
    if debug:
        sys.stderr.write(mask(traceback.format_exc()))


def print_json(value: object) -> None:
    """Print one JSON value on stdout, like every `--json` result."""
    sys.stdout.write(json.dumps(value, ensure_ascii=False, indent=2) + "\n")
