"""docs/cli.md: every command, its arguments and options."""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import typer

from penstock.cli.main import app
from penstock_docs.pages import Region, anchor, table

_ENV = re.compile(r"\s*\[env: (\w+)\]")
_EXAMPLE = re.compile(r"\s*Example:\s+(?P<example>.+)\Z", re.DOTALL)


class Option(NamedTuple):
    """An option or argument as a table shows it."""

    names: str
    value: str
    default: str
    variable: str
    text: str


def commands(
    group: Any = None,  # noqa: ANN401 - typer has its own copy of click's classes
    above: str = "penstock",
) -> Iterator[tuple[str, Any]]:
    """Yield every command that can be run by its full name."""
    group = typer.main.get_command(app) if group is None else group
    for name, command in group.commands.items():
        if command.hidden:
            continue
        if hasattr(command, "commands"):
            yield from commands(command, f"{above} {name}")
        else:
            yield f"{above} {name}", command


def options(command: Any) -> list[Option]:  # noqa: ANN401
    return [
        _option(each)
        for each in command.params
        if each.param_type_name == "option" and "--help" not in each.opts and not each.hidden
    ]


def arguments(command: Any) -> list[Option]:  # noqa: ANN401
    return [_option(each) for each in command.params if each.param_type_name == "argument"]


def common() -> list[Option]:
    """Return the options that most commands have."""
    found = [*commands()]
    count = Counter(option for _, command in found for option in options(command))
    return [option for option, number in count.items() if number > len(found) / 2]


def _option(parameter: Any) -> Option:  # noqa: ANN401
    text = _plain(getattr(parameter, "help", None) or "")
    written = _ENV.search(text)
    named = parameter.envvar or (written[1] if written else None)
    is_flag = getattr(parameter, "is_flag", False)
    names = [*parameter.opts, *parameter.secondary_opts]
    if parameter.param_type_name == "argument":
        shown = parameter.metavar or parameter.name.upper()
        names = [f"{shown}{'…' if parameter.nargs == -1 else ''}"]
    return Option(
        names=", ".join(f"`{name}`" for name in names),
        value="" if is_flag else _value(parameter),
        default="**required**" if parameter.required else _default(parameter),
        variable=f"`{named}`" if named else "",
        text=_ENV.sub("", text),
    )


def _value(parameter: Any) -> str:  # noqa: ANN401
    return "" if parameter.param_type_name == "argument" else parameter.metavar or ""


def _default(parameter: Any) -> str:  # noqa: ANN401
    value = parameter.default
    if value is None or isinstance(value, bool) or callable(value) or value in ("", [], ()):
        return ""
    unset = type(value).__module__.startswith(("click", "typer"))
    return "" if unset else f"`{value}`"


def _plain(text: str) -> str:
    """Return text without the escapes that keep a terminal's markup away."""
    return text.replace(r"\[", "[")


def _shown(found: list[Option], first: str) -> str:
    """Return a table of the columns that are not empty."""
    head = Option(first, "value", "default", "environment", "meaning")
    kept = [i for i in range(len(head)) if i in (0, 4) or any(each[i] for each in found)]
    rows = [tuple(each[i] for i in kept) for each in found]
    return table(tuple(head[i] for i in kept), rows)


def section(name: str, command: Any) -> str:  # noqa: ANN401
    """Return all about one command."""
    text = _plain(inspect.cleandoc(command.help or ""))
    example = _EXAMPLE.search(text)
    about = _EXAMPLE.sub("", text)
    shared = common()
    taken, chosen = arguments(command), [o for o in options(command) if o not in shared]
    usage = [name, "[OPTIONS]", *(_usage(each) for each in command.params)]
    parts = [
        f"### {name}",
        about,
        f"```text\n{' '.join(part for part in usage if part)}\n```",
    ]
    if taken:
        parts.append(_shown(taken, "argument"))
    if chosen:
        parts.append(_shown(chosen, "option"))
    if example:
        lines = inspect.cleandoc(example["example"])
        parts.append(f"Example:\n\n```sh\n{lines}\n```")
    return "\n\n".join(parts)


def _usage(parameter: Any) -> str:  # noqa: ANN401
    if parameter.param_type_name != "argument":
        return ""
    shown = parameter.metavar or parameter.name.upper()
    shown = f"{shown}…" if parameter.nargs == -1 else shown
    return shown if parameter.required else f"[{shown}]"


def generate(region: Region) -> str:
    found = [*commands()]
    match region.what:
        case "commands":
            return "\n\n".join(section(name, command) for name, command in found)
        case "list of commands":
            return table(
                ("command", "what it does"),
                [(f"[`{name}`](#{anchor(name)})", _first(command)) for name, command in found],
            )
        case "common options":
            return _shown(common(), "option")
        case _:
            raise LookupError(f"there is nothing to generate for {region.what!r}")


def _first(command: Any) -> str:  # noqa: ANN401
    """Return the first sentence about a command."""
    text = " ".join(_plain(inspect.cleandoc(command.help or "")).split("\n\n")[0].split())
    return re.split(r"(?<=[.!?]) ", text)[0]
