"""A file that others may change decides nothing here."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from penstock.errors import UsageError
from penstock.servicekit.guarded import check_directories, check_guarded, read_guarded


@pytest.fixture
def file(tmp_path: Path) -> Path:
    directory = tmp_path / "etc"
    directory.mkdir()
    directory.chmod(0o755)
    path = directory / "tokens"
    path.write_bytes(b"secret")
    path.chmod(0o644)
    return path


def refused(path: Path) -> UsageError:
    with pytest.raises(UsageError) as caught:
        read_guarded(path)
    assert "secret" not in str(caught.value)
    return caught.value


def test_a_file_of_ours_is_read(file: Path) -> None:
    assert read_guarded(file) == b"secret"
    file.chmod(0o600)
    assert read_guarded(file) == b"secret"


@pytest.mark.parametrize("mode", [0o664, 0o646, 0o622, 0o666])
def test_a_file_that_others_may_write_is_refused(file: Path, mode: int) -> None:
    file.chmod(mode)
    assert f"chmod go-w {file}" in str(refused(file))


@pytest.mark.parametrize(("mode", "allowed"), [(0o775, False), (0o757, False), (0o1777, True)])
def test_so_is_one_in_a_directory_that_others_may_write(
    file: Path, mode: int, allowed: bool
) -> None:
    """Unless it is sticky: there they cannot replace what is ours."""
    file.parent.chmod(mode)
    if allowed:
        assert read_guarded(file) == b"secret"
    else:
        assert f"chmod go-w {file.parent}" in str(refused(file))


def test_also_if_the_directory_is_far_above(file: Path) -> None:
    below = file.parent / "a" / "b"
    below.mkdir(parents=True)
    moved = file.rename(below / "tokens")
    file.parent.chmod(0o777)
    refused(moved)
    with pytest.raises(UsageError):
        check_directories(moved)


def test_links_are_followed_and_their_targets_checked(tmp_path: Path, file: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(Path("etc") / "tokens")
    assert read_guarded(link) == b"secret"
    relative = file.parent / "up"
    relative.symlink_to("../etc/./tokens")
    assert read_guarded(relative) == b"secret"
    file.chmod(0o666)
    refused(link)
    file.chmod(0o644)
    through = tmp_path / "through"
    through.symlink_to(file.parent)
    file.parent.chmod(0o777)
    refused(through / "tokens")


def test_a_link_in_a_world_writable_directory_is_refused(tmp_path: Path, file: Path) -> None:
    """Its target is sound, and tomorrow it leads to another."""
    shared = tmp_path / "shared"
    shared.mkdir()
    (shared / "tokens").symlink_to(file)
    shared.chmod(0o777)
    refused(shared / "tokens")


def test_a_loop_a_directory_and_nothing_are_no_files(tmp_path: Path) -> None:
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    with pytest.raises(OSError, match="symbolic links"):
        check_guarded(loop)
    with pytest.raises(UsageError, match="not a file"):
        check_guarded(tmp_path)
    with pytest.raises(FileNotFoundError):
        check_guarded(tmp_path / "absent")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_file_of_another_user_is_refused(tmp_path: Path, file: Path) -> None:
    os.chown(file, 12345, -1)
    assert "another user" in str(refused(file))
    os.chown(file, 0, -1)
    os.chown(file.parent, 12345, -1)
    assert "another user" in str(refused(file))
    os.chown(file.parent, 0, -1)
    link = tmp_path / "link"
    link.symlink_to(file)
    os.chown(link, 12345, -1, follow_symlinks=False)
    assert "another user" in str(refused(link))
