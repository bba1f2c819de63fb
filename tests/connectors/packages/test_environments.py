"""Environments of packages, made with pip from wheels that are written here: no network."""

from __future__ import annotations

import json
import subprocess
import zipfile
from pathlib import Path

import pytest

from penstock.connectors.packages import environments
from penstock.connectors.packages.environments import Package, find, install, installed, parse
from penstock.errors import PenstockError, Unavailable, UserError


@pytest.mark.parametrize(
    ("text", "package", "distribution"),
    [
        ("airbyte:source-faker", ("airbyte", "source-faker", None), "airbyte-source-faker"),
        ("airbyte:source-faker==7.2.1", ("airbyte", "source-faker", "7.2.1"), None),
        ("airbyte-source-faker==7.2.1", ("airbyte", "source-faker", "7.2.1"), None),
        ("airbyte:airbyte_source_Faker", ("airbyte", "source-faker", None), None),
        ("singer:tap-github", ("singer", "tap-github", None), "tap-github"),
        ("pipelinewise-tap-postgres", ("singer", "pipelinewise-tap-postgres", None), None),
        (
            "airbyte:source-declarative-manifest",
            ("airbyte", "source-declarative-manifest", None),
            "airbyte-cdk",
        ),
    ],
)
def test_names_of_packages(
    text: str, package: tuple[str, str, str | None], distribution: str | None
) -> None:
    found = parse(text)
    assert (found.protocol, found.name, found.version) == package
    assert distribution in (None, found.distribution)


@pytest.mark.parametrize(
    "text", ["", "requests", "docker:x", "airbyte:", "singer:a b", "airbyte:../x", "airbyte:--pre"]
)
def test_what_is_no_package_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="is not the name of a package"):
        parse(text)


def test_the_place_is_below_the_data_directory_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    assert environments.home({"XDG_DATA_HOME": "/x"}) == Path("/x/penstock/connectors")
    assert environments.home({}) == Path.home() / ".local/share/penstock/connectors"


def write_wheel(directory: Path, name: str, version: str, *programs: str) -> None:
    """A package whose programs print their version."""
    module = name.replace("-", "_")
    info = f"{module}-{version}.dist-info"
    scripts = "".join(f"{program} = {module}:main\n" for program in programs)
    files = {
        f"{module}.py": f"def main():\n    print('{version}')\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": f"[console_scripts]\n{scripts}",
    }
    record = "".join(f"{path},,\n" for path in (*files, f"{info}/RECORD"))
    directory.mkdir(exist_ok=True)
    with zipfile.ZipFile(directory / f"{module}-{version}-py3-none-any.whl", "w") as wheel:
        for path, text in {**files, f"{info}/RECORD": record}.items():
            wheel.writestr(path, text)


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where pip looks, and nowhere else: the settings of a machine are pip's own."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    return tmp_path / "wheels"


@pytest.mark.slow
def test_a_package_is_installed_once_and_upgraded_when_asked(tmp_path: Path, wheels: Path) -> None:
    write_wheel(wheels, "airbyte-source-tiny", "1.0", "source-tiny", "other")
    said: list[str] = []
    place, package = tmp_path / "home", parse("airbyte:source-tiny")
    first = install(package, said.append, directory=place)
    assert (first.image, first.version) == ("airbyte:source-tiny", "1.0")
    assert said[:2] == [
        f"making an environment in {place / 'airbyte-source-tiny'}",
        "installing airbyte-source-tiny, which may take some minutes",
    ]
    ran = subprocess.run([first.program], capture_output=True, text=True, check=True)
    assert ran.stdout == "1.0\n"
    assert installed(place) == [first]

    write_wheel(wheels, "airbyte-source-tiny", "1.1", "source-tiny")
    said.clear()
    assert install(package, said.append, directory=place) == first
    assert said == ["airbyte:source-tiny (airbyte-source-tiny 1.0) is installed already"]
    assert install(package, said.append, upgrade=True, directory=place).version == "1.1"
    back = install(parse("airbyte:source-tiny==1.0"), said.append, directory=place)
    assert back.version == "1.0"
    assert find(package, where="here", directory=place) == back

    with pytest.raises(Unavailable, match="could not install airbyte-source-tiny==9") as failed:
        install(parse("airbyte:source-tiny==9"), said.append, directory=place)
    assert "No matching distribution found" in str(failed.value.why)
    assert find(package, where="here", directory=place) == back, "what was there still is"

    assert environments.remove(package, directory=place)
    assert not environments.remove(package, directory=place)
    assert installed(place) == []


@pytest.mark.slow
def test_an_install_that_failed_leaves_nothing_that_looks_installed(
    tmp_path: Path, wheels: Path
) -> None:
    package = parse("singer:tap-tiny")
    with pytest.raises(Unavailable, match="pip could not install tap-tiny") as failed:
        install(package, lambda _: None, directory=tmp_path / "home")
    assert "No matching distribution found for tap-tiny" in str(failed.value.why)
    assert "--python" in str(failed.value.fix)
    log = Path(str(failed.value.fix).rpartition(" ")[2])
    assert "ERROR" in log.read_text()
    assert installed(tmp_path / "home") == []
    write_wheel(wheels, "tap-tiny", "2.0", "tap-small")
    found = install(package, lambda _: None, directory=tmp_path / "home")
    assert Path(found.program).name == "tap-small", "the only program that is a tap"


@pytest.mark.slow
def test_a_package_without_a_program_is_refused(tmp_path: Path, wheels: Path) -> None:
    write_wheel(wheels, "tap-tiny", "1.0", "a", "b")
    with pytest.raises(UserError, match="has no program that is a singer connector") as refused:
        install(parse("singer:tap-tiny"), lambda _: None, directory=tmp_path / "home")
    assert refused.value.why == "it has a, b"
    assert installed(tmp_path / "home") == []


def test_a_python_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="cannot run /no/python"):
        install(
            parse("singer:tap-tiny"),
            lambda _: None,
            python="/no/python",
            directory=tmp_path / "home",
        )


def test_two_installs_of_one_package_do_not_meet(tmp_path: Path) -> None:
    place = tmp_path / "home" / "singer-tap-tiny"
    with (
        environments._locked(place),
        pytest.raises(Unavailable, match="another process is installing"),
    ):
        install(parse("singer:tap-tiny"), lambda _: None, directory=place.parent)


@pytest.mark.parametrize("text", ["", "{", "[]", json.dumps({"image": "x"})])
def test_a_record_that_cannot_be_read_is_none(tmp_path: Path, text: str) -> None:
    package = Package(protocol="singer", name="tap-x")
    (tmp_path / package.directory).mkdir()
    (tmp_path / package.directory / "penstock.json").write_text(text)
    assert installed(tmp_path) == []
    with pytest.raises(PenstockError, match="is not installed"):
        find(package, where="here", directory=tmp_path)
