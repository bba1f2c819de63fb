"""Packages of Python derivations: installed once per set of requirements, found when code loads."""

from __future__ import annotations

import dataclasses
import zipfile
from pathlib import Path

import pytest

from penstock.errors import Unavailable
from penstock.model.spec import DerivationSpec, Shards
from penstock.runtime.derive.python_dependencies import (
    dependencies_path,
    install_dependencies,
    requirements,
)
from runtime.derive.python_catalogs import Task, engine, ints

DERIVATION = DerivationSpec(
    using="python", transforms=(), shuffle_key_types=(), shards=Shards(max_txn_s=1)
)


def wheel(directory: Path, name: str) -> str:
    """A package without code but a word, as pip installs it without an index."""
    info = f"{name}-1.0.dist-info"
    path = directory / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr(f"{name}/__init__.py", "WORD = 'installed'\n")
        file.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        file.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        file.writestr(f"{info}/RECORD", "")
    return str(path)


def test_requirements_of_the_catalog_and_of_the_project() -> None:
    toml = "[project]\nname = 'p'\ndependencies = ['httpx>=0.27', 'rich']\n"
    both = dataclasses.replace(
        DERIVATION, dependencies=("rich", "numpy<3"), files=(("p/pyproject.toml", toml),)
    )
    assert requirements(both) == ("rich", "numpy<3", "httpx>=0.27")
    assert dependencies_path(DERIVATION, Path("x")) is None
    other = dataclasses.replace(both, dependencies=("rich",))
    assert dependencies_path(both, Path("x")) != dependencies_path(other, Path("x"))


def test_installed_packages_are_found(tmp_path: Path) -> None:
    name = "penstock_test_word"
    derivation = dataclasses.replace(DERIVATION, dependencies=(wheel(tmp_path, name),))
    path = install_dependencies(derivation, tmp_path / "packages")
    assert path is not None
    Path(derivation.dependencies[0]).unlink()  # so that it cannot be installed again
    assert install_dependencies(derivation, tmp_path / "packages") == path
    assert [p.name for p in (tmp_path / "packages").iterdir()] == [path.name]
    code = f"import {name}\nclass Derivation:\n  def from_ints(self, read):\n"
    code += f"    return {{'Key': {name}.WORD}}\n"
    task = Task(engine(code, packages=str(path)))
    assert task.transaction(ints(("a", 1))) == [{"Key": "installed"}]


def test_a_package_that_cannot_be_installed_is_named(tmp_path: Path) -> None:
    missing = str(tmp_path / "nothing-1.0-py3-none-any.whl")
    derivation = dataclasses.replace(DERIVATION, dependencies=(missing,))
    with pytest.raises(Unavailable, match="cannot be installed") as failed:
        install_dependencies(derivation, tmp_path / "packages")
    assert failed.value.where == missing
    assert list((tmp_path / "packages").iterdir()) == []
