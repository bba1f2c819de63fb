"""Catalog files are found, read once, and never outside the catalog's directory."""

from pathlib import Path

import pytest

from penstock.catalog import load
from penstock.catalog.diagnostics import Diagnostics
from penstock.catalog.load import Sources


def sources(mains: list[Path], *, allow_outside: bool = False) -> tuple[Sources, list[str]]:
    diagnostics = Diagnostics()
    loaded = Sources(diagnostics, allow_outside=allow_outside)
    loaded.load(mains)
    return loaded, [d.message for d in diagnostics]


def write(directory: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return directory / "catalog.yaml"


def test_each_file_loads_once_however_it_is_reached(tmp_path: Path) -> None:
    main = write(
        tmp_path,
        {
            "catalog.yaml": "import: [a.yaml, sub/b.yaml]",
            "a.yaml": "import: [sub/b.yaml]",
            "sub/b.yaml": "import: [../c.yaml]",
            "c.yaml": "{}",
        },
    )
    loaded, complaints = sources([main, tmp_path / "c.yaml"])
    assert complaints == []
    assert [Path(root.at.file).name for root in loaded.catalogs] == [
        "catalog.yaml",
        "a.yaml",
        "b.yaml",
        "c.yaml",
    ]


@pytest.mark.parametrize("name", ["catalog.yaml", "catalog.yml", "flow.yaml"])
def test_a_directory_stands_for_its_catalog(tmp_path: Path, name: str) -> None:
    write(tmp_path, {name: "collections: {}"})
    loaded, complaints = sources([tmp_path])
    assert complaints == []
    assert [Path(root.at.file).name for root in loaded.catalogs] == [name]


def test_only_catalogs_are_loaded_by_an_import(tmp_path: Path) -> None:
    main = write(
        tmp_path, {"catalog.yaml": "import: [{url: schema.json, contentType: JSON_SCHEMA}]"}
    )
    loaded, complaints = sources([main])
    assert len(loaded.catalogs) == 1
    assert complaints == ["an import of JSON_SCHEMA is accepted, but has no effect here"]


def test_outside_is_allowed_on_request(tmp_path: Path) -> None:
    write(tmp_path, {"shared.yaml": "{}"})
    main = write(tmp_path / "inner", {"catalog.yaml": "import: [../shared.yaml]"})
    assert sources([main])[1] == ["../shared.yaml is outside the catalog's directory"]
    assert sources([main], allow_outside=True)[1] == []


def test_a_link_does_not_lead_outside(tmp_path: Path) -> None:
    write(tmp_path, {"secret.yaml": "{}"})
    main = write(tmp_path / "inner", {"catalog.yaml": "import: [link.yaml]"})
    (tmp_path / "inner" / "link.yaml").symlink_to(tmp_path / "secret.yaml")
    assert sources([main])[1] == ["link.yaml is outside the catalog's directory"]


def test_json_files_may_have_tabs_and_escaped_emoji(tmp_path: Path) -> None:
    main = write(
        tmp_path,
        {
            "catalog.yaml": "import: [more.json]",
            "more.json": '{\n\t"tests": {"\\ud83d\\ude00 \\\\ud83d": []}\n}',
        },
    )
    loaded, complaints = sources([main])
    assert complaints == []
    assert loaded.catalogs[1].plain() == {"tests": {"\U0001f600 \\ud83d": []}}


def test_a_byte_that_is_not_utf_8_is_placed(tmp_path: Path) -> None:
    main = tmp_path / "catalog.yaml"
    main.write_bytes(b"collections:\n  caf\xe9: {}\n")
    diagnostics = Diagnostics()
    Sources(diagnostics).load([main])
    (found,) = diagnostics
    assert (found.at.line, found.at.column, found.message) == (2, 6, "byte 0xe9 is not UTF-8")


def test_a_byte_order_mark_is_skipped(tmp_path: Path) -> None:
    main = tmp_path / "catalog.yaml"
    main.write_bytes(b"\xef\xbb\xbfcollections: {}\n")
    loaded, complaints = sources([main])
    assert complaints == []
    assert loaded.catalogs[0].plain() == {"collections": {}}


def test_a_main_file_that_is_not_there_is_reported(tmp_path: Path) -> None:
    missing = tmp_path / "none.yaml"
    assert sources([missing])[1] == [f"cannot read {missing}: no such file"]


def test_a_file_without_end_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "FILE_BYTES_MAX", 10)
    main = write(tmp_path, {"catalog.yaml": "collections: {}"})
    assert sources([main])[1] == [f"{main} is larger than 10 bytes"]


def test_a_chain_of_imports_has_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "IMPORT_DEPTH_MAX", 3)
    files = {f"f{i}.yaml": f"import: [f{i + 1}.yaml]" for i in range(10)}
    write(tmp_path, files)
    assert sources([tmp_path / "f0.yaml"])[1] == ["imports nest deeper than 3 files"]
