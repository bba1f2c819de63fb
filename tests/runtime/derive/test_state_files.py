"""Which files of a state its leaders remove, and which they leave alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from penstock.journal.blobs import MissingBlob, open_blobs
from penstock.runtime.derive.state_files import BlobStateFiles


@pytest.fixture
def files(tmp_path: Path) -> BlobStateFiles:
    return BlobStateFiles(
        blobs=open_blobs(f"file://{tmp_path}"), task="acme/sums", epoch=5, beside=tmp_path / "local"
    )


def exists(files: BlobStateFiles, name: str) -> bool:
    try:
        files.read(name)
    except MissingBlob:
        return False
    return True


def test_a_session_removes_what_earlier_ones_left_and_nothing_names(files: BlobStateFiles) -> None:
    earlier, another_task = replace(files, epoch=4), replace(files, task="acme/other", epoch=4)
    named, left, own = earlier.write(b"1"), earlier.write(b"2"), files.write(b"3")
    others = another_task.write(b"4")
    files.sweep({"sqlite": {"0": {"base": {"file": named}}}})
    assert [exists(files, name) for name in (named, left, own)] == [True, False, True]
    assert exists(another_task, others)


@pytest.mark.parametrize("later", [6, 10])
def test_a_leader_that_slept_leaves_the_files_of_its_successor_alone(
    files: BlobStateFiles, later: int
) -> None:
    """It knows the state that it took over, and not what was committed since."""
    name = replace(files, epoch=later).write(b"committed by the successor")
    files.sweep({})
    assert exists(files, name)
