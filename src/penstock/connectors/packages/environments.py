"""Environments of packages: a virtual environment for each, since their dependencies would fight.

They are below `~/.local/share/penstock/connectors` (`XDG_DATA_HOME`). An environment is complete if
it has a record, which is written last; anything else is what an install left behind that did not
come to its end, and is made anew.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from penstock.errors import Unavailable, UserError
from penstock.runtime.connector.common import ConnectorError

Report = Callable[[str], None]

_RECORD: Final = "penstock.json"
_REQUIREMENT: Final = re.compile(
    r"(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)(?:==(?P<version>[\w.!+*-]+))?"
)
_MANIFEST_RUNNER: Final = "source-declarative-manifest"
_KEPT_LINES: Final = 5

# Asked of a fresh environment: the version of a package, and the programs that it has.
_ASK: Final = """
import importlib.metadata, json, sys
found = importlib.metadata.distribution(sys.argv[1])
programs = [each.name for each in found.entry_points if each.group == "console_scripts"]
print(json.dumps({"version": found.version, "programs": programs}))
"""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """A package as people name it: `airbyte:source-faker`, `singer:tap-github==1.2`."""

    protocol: str
    name: str
    """As the image of a capture has it, without a version."""
    version: str | None = None

    @property
    def image(self) -> str:
        return f"{self.protocol}:{self.name}"

    @property
    def distribution(self) -> str:
        """As pip knows it."""
        if self.protocol == "airbyte" and self.name == _MANIFEST_RUNNER:
            return "airbyte-cdk"
        return f"airbyte-{self.name}" if self.protocol == "airbyte" else self.name

    @property
    def requirement(self) -> str:
        return f"{self.distribution}=={self.version}" if self.version else self.distribution

    @property
    def directory(self) -> str:
        return f"{self.protocol}-{self.name}"

    @property
    def install_command(self) -> str:
        version = f"=={self.version}" if self.version else ""
        return f"penstock connector install {self.image}{version}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Installed:
    """The record of a complete environment."""

    image: str
    distribution: str
    version: str
    program: str
    """Its path."""

    @property
    def summary(self) -> str:
        return f"{self.image} ({self.distribution} {self.version})"


def parse(text: str, *, protocol: str | None = None) -> Package:
    """Read the name of a package. Without a protocol, the name of a distribution tells which."""
    given, colon, rest = text.partition(":")
    if colon and protocol is None:
        protocol, text = given, rest
    found = _REQUIREMENT.fullmatch(text.strip())
    if found is None or protocol not in (None, "airbyte", "singer"):
        raise _unreadable(text)
    name = re.sub(r"[-_.]+", "-", found["name"]).lower()
    if protocol is None:
        if name.startswith("airbyte-source-"):
            protocol = "airbyte"
        elif re.search(r"(^|-)tap-", name):
            protocol = "singer"
        else:
            raise _unreadable(text)
    if protocol == "airbyte":
        name = name.removeprefix("airbyte-")
    return Package(protocol=protocol, name=name, version=found["version"])


def _unreadable(text: str) -> UserError:
    return UserError(
        f"{text} is not the name of a package",
        fix="for example airbyte:source-faker, airbyte-source-faker==7.2.1, or "
        "singer:pipelinewise-tap-postgres",
    )


def home(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the directory that has the environments."""
    data = environ.get("XDG_DATA_HOME")
    base = Path(data) if data else Path.home() / ".local" / "share"
    return base / "penstock" / "connectors"


# ---------------------------------------------------------------------------------------- looking


def installed(directory: Path | None = None) -> list[Installed]:
    """Return what is installed, by image."""
    place = directory or home()
    found = [_record(path.parent) for path in sorted(place.glob(f"*/{_RECORD}"))]
    return [each for each in found if each is not None]


def find(package: Package, *, where: str, directory: Path | None = None) -> Installed:
    """Return the environment of a package; the error says how to install it."""
    record = _record((directory or home()) / package.directory)
    if record is None:
        raise ConnectorError(
            f"{package.image} is not installed", where=where, fix=package.install_command
        )
    if package.version not in (None, record.version):
        raise ConnectorError(
            f"{package.image} is installed in version {record.version}, and the catalog asks for "
            f"{package.version}",
            where=where,
            fix=package.install_command,
        )
    return record


def _record(directory: Path) -> Installed | None:
    try:
        return Installed(**json.loads((directory / _RECORD).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


# ------------------------------------------------------------------------------------- installing


def install(
    package: Package,
    report: Report,
    *,
    beside: Sequence[str] = (),
    python: str = sys.executable,
    upgrade: bool = False,
    directory: Path | None = None,
) -> Installed:
    """Install a package into an environment of its own, unless it is there already.

    `beside` are more requirements. pip is run as the machine has set it up.
    """
    place = (directory or home()) / package.directory
    with _locked(place):
        there = _record(place)
        if there and not upgrade and not beside and package.version in (None, there.version):
            report(f"{there.summary} is installed already")
            return there
        if there is None:
            report(f"making an environment in {place}")
            _make(place, python)
        report(f"installing {package.requirement}, which may take some minutes")
        arguments = ["--upgrade"] if upgrade else []
        _pip(place, [*arguments, package.requirement, *beside], report, package)
        return _finish(place, package)


def remove(package: Package, *, directory: Path | None = None) -> bool:
    """Remove the environment of a package; False if there was none."""
    place = (directory or home()) / package.directory
    if not place.exists():
        return False
    with _locked(place):
        (place / _RECORD).unlink(missing_ok=True)
        shutil.rmtree(place)
    place.with_suffix(".log").unlink(missing_ok=True)
    return True


@contextlib.contextmanager
def _locked(place: Path) -> Iterator[None]:
    """Keep other installs of the package out."""
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(place.with_name(f".{place.name}.lock"), os.O_CREAT | os.O_RDWR, 0o600)
    except OSError as error:
        raise Unavailable(
            f"cannot write to {place.parent}",
            why=error.strerror,
            fix="let this user write there, or set XDG_DATA_HOME to another directory",
        ) from None
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, lock)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Unavailable(
                f"another process is installing {place.name}", fix="wait for it, and try again"
            ) from None
        yield


def _make(place: Path, python: str) -> None:
    """Make an empty environment; nothing of an unfinished one is kept."""
    shutil.rmtree(place, ignore_errors=True)
    try:
        made = subprocess.run(  # noqa: S603 - the interpreter that the user named, or this one
            [python, "-m", "venv", str(place)], capture_output=True, text=True, check=False
        )
    except OSError as error:
        raise Unavailable(
            f"cannot run {python}", why=error.strerror, fix="name a Python that exists: --python"
        ) from None
    if made.returncode:
        said = (made.stderr or made.stdout).strip().splitlines()
        raise Unavailable(
            f"{python} could not make a virtual environment",
            where=str(place),
            why=" ".join(said[-_KEPT_LINES:]) or f"exit code {made.returncode}",
            fix="on Debian and Ubuntu: apt install python3-venv; or name another Python: --python",
        )


def _pip(place: Path, requirements: Sequence[str], report: Report, package: Package) -> None:
    log = place.with_suffix(".log")
    wrong: deque[str] = deque(maxlen=_KEPT_LINES)
    command = [str(place / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]
    with (
        log.open("w", encoding="utf-8") as file,
        subprocess.Popen(  # noqa: S603 - the pip of the environment that was just made
            [*command, "install", "--no-input", *requirements],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        ) as pip,
    ):
        for line in pip.stdout or ():
            file.write(line)
            text = line.strip()
            if text.startswith(("Collecting ", "Downloading ", "Building ", "Installing ")):
                report(text)
            if text.lower().startswith("error"):
                wrong.append(text)
    if pip.returncode:
        missing = any("No matching distribution" in line for line in wrong)
        raise Unavailable(
            f"pip could not install {package.requirement}",
            why="; ".join(wrong) or f"exit code {pip.returncode}",
            fix=f"check the name and the version, and that it supports this Python (--python names "
            f"another); pip's output is in {log}"
            if missing
            else f"pip's whole output is in {log}",
        )


def _finish(place: Path, package: Package) -> Installed:
    """Write the record."""
    asked = subprocess.run(  # noqa: S603 - the interpreter of the environment
        [str(place / "bin" / "python"), "-I", "-c", _ASK, package.distribution],
        capture_output=True,
        text=True,
        check=False,
    )
    if asked.returncode:
        said = asked.stderr.strip().splitlines()
        raise Unavailable(
            f"{package.distribution} was installed, and cannot be found",
            where=str(place),
            why=said[-1] if said else None,
            fix=f"{package.install_command} --upgrade",
        )
    found = json.loads(asked.stdout)
    record = Installed(
        image=package.image,
        distribution=package.distribution,
        version=found["version"],
        program=str(place / "bin" / _program(package, found["programs"])),
    )
    fresh = place / f"{_RECORD}.new"
    fresh.write_text(json.dumps(dataclasses.asdict(record)), encoding="utf-8")
    fresh.replace(place / _RECORD)
    return record


def _program(package: Package, programs: Sequence[str]) -> str:
    """Choose the program that speaks the protocol."""
    if package.name in programs:
        return package.name
    kind = "source-" if package.protocol == "airbyte" else "tap-"
    likely = [each for each in programs if each.startswith(kind)] or list(programs)
    if len(likely) != 1:
        raise UserError(
            f"{package.distribution} has no program that is a {package.protocol} connector",
            why=f"it has {', '.join(programs) or 'no programs'}",
            fix="is it another package that you want?",
        )
    return likely[0]
