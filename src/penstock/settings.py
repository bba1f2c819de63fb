"""Settings: flag > environment > penstock.toml > default, resolved once.

This is the only module that reads the environment for settings. `master` and `conf` are the user's
Spark settings; those that Penstock itself sets are in `engine.py`. Secrets are not settings: they
stay references (`${env:NAME}`, `${file:path}`) until a connector is opened.
"""

from __future__ import annotations

import dataclasses
import difflib
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

from penstock.errors import UserError
from penstock.servicekit.secrets import conceal_url

TOML_NAME = "penstock.toml"
LOG_LEVELS = ("error", "warning", "info", "debug")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The common options of every command, resolved."""

    data: Path = Path(".penstock")
    consensus: str = ""
    """URL of the consensus store; by default SQLite inside the data directory."""
    blob: str = ""
    """URL of the blob store; by default a directory inside the data directory."""
    catalog: tuple[Path, ...] = ()
    master: str = "local[*]"
    conf: Mapping[str, str] = dataclasses.field(default_factory=dict)
    log_level: str = "info"
    log_json: bool = False
    json: bool = False
    debug: bool = False
    failpoint: str | None = None

    @classmethod
    def resolve(
        cls,
        flags: Mapping[str, Any],
        environ: Mapping[str, str],
        directories: Sequence[Path] = (Path(),),
    ) -> Self:
        """Take each setting from the first place that has it.

        `flags` holds None, or an empty list, for flags that were not given. The first penstock.toml
        found in `directories` counts.
        """
        file = next((d / TOML_NAME for d in directories if (d / TOML_NAME).is_file()), None)
        written = _read_toml(file) if file else {}
        chosen: dict[str, Any] = {}
        for field in dataclasses.fields(cls):
            name, variable = field.name, f"PENSTOCK_{field.name.upper()}"
            given = flags.get(name)
            if given is not None and given != []:
                chosen[name] = _READERS[name](given, f"--{name.replace('_', '-')}")
            elif environ.get(variable):
                chosen[name] = _READERS[name](environ[variable], variable)
            elif name in written:
                chosen[name] = _READERS[name](written[name], f"{file}: {name}")
        settings = cls(**chosen)
        for url in (settings.consensus, settings.blob):
            conceal_url(url)
        return dataclasses.replace(
            settings,
            consensus=settings.consensus or sqlite_url(settings.data / "consensus.db"),
            blob=settings.blob or str(settings.data / "blobs"),
        )


def sqlite_url(path: Path) -> str:
    """Return a URL in SQLAlchemy's form: three slashes, then the path; four if it is absolute."""
    return f"sqlite:///{path}"


def _read_toml(file: Path) -> dict[str, Any]:
    try:
        written = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as e:
        raise UserError(f"cannot read {file}", why=str(e), fix="correct or remove it") from e
    known = {f.name.replace("_", "-") for f in dataclasses.fields(Settings)} - _NOT_IN_FILES
    for name in written:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            raise UserError(
                f'unknown setting "{name}"',
                where=str(file),
                fix=f'did you mean "{near[0]}"?' if near else f"known: {', '.join(sorted(known))}",
            )
    return {name.replace("-", "_"): value for name, value in written.items()}


def _text(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise UserError(f"expected text, found {value!r}", where=where)
    return value


def _path(value: object, where: str) -> Path:
    return value if isinstance(value, Path) else Path(_text(value, where)).expanduser()


def _paths(value: object, where: str) -> tuple[Path, ...]:
    items = value if isinstance(value, list | tuple) else [value]
    return tuple(_path(item, where) for item in items)


def _flag(value: object, where: str) -> bool:
    words = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in words:
        return words[value.lower()]
    raise UserError(f"expected true or false, found {value!r}", where=where)


def _level(value: object, where: str) -> str:
    if value not in LOG_LEVELS:
        raise UserError(
            f"unknown log level {value!r}", where=where, fix=f"one of {', '.join(LOG_LEVELS)}"
        )
    return str(value)


def _conf(value: object, where: str) -> Mapping[str, str]:
    if isinstance(value, Mapping):
        return MappingProxyType({str(k): str(v) for k, v in value.items()})
    items = value if isinstance(value, list | tuple) else str(value).split(",")
    pairs: dict[str, str] = {}
    for item in items:
        key, equals, setting = str(item).partition("=")
        if not equals or not key.strip():
            raise UserError(
                f'"{item}" is not of the form key=value',
                where=where,
                fix="for example: --conf spark.driver.memory=4g",
            )
        pairs[key.strip()] = setting.strip()
    return MappingProxyType(pairs)


_NOT_IN_FILES = {"json", "debug", "failpoint"}
_READERS: Mapping[str, Callable[[Any, str], Any]] = {
    "data": _path,
    "consensus": _text,
    "blob": _text,
    "catalog": _paths,
    "master": _text,
    "conf": _conf,
    "log_level": _level,
    "log_json": _flag,
    "json": _flag,
    "debug": _flag,
    "failpoint": _text,
}
