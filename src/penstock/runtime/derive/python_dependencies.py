"""Packages that Python derivations import, installed into a directory of each set of requirements.

Nothing is installed while a task runs: a process that runs user code finds the packages there, or
fails with an error that names the one it misses.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tomllib
import uuid
from pathlib import Path, PurePosixPath

from penstock.errors import Unavailable
from penstock.model.spec import DerivationSpec

_LINES_SHOWN = 5


def requirements(derivation: DerivationSpec) -> tuple[str, ...]:
    """What the catalog lists, and what the project's pyproject.toml depends on."""
    listed = list(derivation.dependencies)
    for path, text in derivation.files:
        if PurePosixPath(path).name == "pyproject.toml":
            project = tomllib.loads(text).get("project", {})
            listed += [str(item) for item in project.get("dependencies", ())]
    return tuple(dict.fromkeys(listed))


def dependencies_path(derivation: DerivationSpec, directory: Path) -> Path | None:
    """Where the packages of a derivation are, or will be; None if it needs none."""
    wanted = requirements(derivation)
    if not wanted:
        return None
    text = "\n".join([sys.implementation.cache_tag or "", *sorted(wanted)])
    return directory / hashlib.sha256(text.encode()).hexdigest()[:32]


def install_dependencies(derivation: DerivationSpec, directory: Path) -> Path | None:
    """Install the packages of a derivation with pip, once; return where they are."""
    path = dependencies_path(derivation, directory)
    if path is None or path.is_dir():
        return path
    directory.mkdir(parents=True, exist_ok=True)
    building = directory / f".{path.name}.{uuid.uuid4().hex}"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    command += ["--target", str(building), "--", *requirements(derivation)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
        if done.returncode != 0:
            said = done.stderr.strip().splitlines()[-_LINES_SHOWN:]
            raise Unavailable(
                "packages of a derivation cannot be installed",
                where=", ".join(requirements(derivation)),
                why="\n".join(said) or f"pip ended with {done.returncode}",
                fix="correct dependencies of using: python, or let pip reach its index",
            )
        building.mkdir(exist_ok=True)
        try:
            building.rename(path)
        except OSError:
            if not path.is_dir():  # otherwise another process was first
                raise
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return path
