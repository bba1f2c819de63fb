"""The blob store: on a disk and behind the S3 protocol, the same promises."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.errors import Bug, Unavailable, UsageError
from penstock.journal.blobs import BlobStore, MissingBlob, check_path, open_blobs
from penstock.testing.postgres import free_port
from support.s3 import SECRET_KEY, running_s3


@pytest.fixture(scope="module")
def s3_url() -> Iterator[str]:
    with running_s3() as url:
        yield url


def under(url: str, prefix: str) -> str:
    """The same bucket, one prefix down: a store of the test's own."""
    address, question, query = url.partition("?")
    return f"{address}/{prefix}{question}{query}"


@pytest.fixture(params=["disk", "s3"])
def blobs(request: pytest.FixtureRequest, tmp_path: Path) -> BlobStore:
    if request.param == "disk":
        return open_blobs(str(tmp_path / "blobs"))
    return open_blobs(under(request.getfixturevalue("s3_url"), uuid.uuid4().hex))


def test_an_object_is_read_as_it_was_written(blobs: BlobStore) -> None:
    blobs.write("acme/orders/region=%C3%A9 &+/a-1.parquet", b"hello")
    assert blobs.read("acme/orders/region=%C3%A9 &+/a-1.parquet") == b"hello"
    with blobs.open("acme/orders/region=%C3%A9 &+/a-1.parquet") as source:
        assert source.size() == 5
        assert source.read_at(2, 1) == b"el"


def test_a_large_object_is_streamed_in_parts(blobs: BlobStore) -> None:
    block = os.urandom(1 << 20)
    with blobs.create("large") as sink:
        for _ in range(11):
            sink.write(block)
    with blobs.open("large") as source:
        assert source.size() == 11 << 20
        assert source.read_at(1 << 20, 10 << 20) == block


def test_an_object_appears_when_it_is_complete_and_not_before(blobs: BlobStore) -> None:
    with blobs.create("late") as sink:
        sink.write(b"x")
        assert not blobs.exists("late")
    assert blobs.exists("late")


def test_nothing_remains_of_a_write_that_failed(blobs: BlobStore) -> None:
    def write_half() -> None:
        with blobs.create("a/half") as sink:
            sink.write(b"x" * 100)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        write_half()
    assert not blobs.exists("a/half")
    assert list(blobs.list()) == []


def test_an_empty_object_is_an_object(blobs: BlobStore) -> None:
    blobs.write("empty", b"")
    assert blobs.exists("empty")
    assert blobs.read("empty") == b""


def test_listing_knows_paths_sizes_and_ages(blobs: BlobStore) -> None:
    written = {f"c/p={i}/{i}.parquet": i for i in range(1, 4)} | {"top": 5, "c/q/deep/er": 6}
    for path, size in written.items():
        blobs.write(path, b"x" * size)
    listed = list(blobs.list())
    assert {found.path: found.bytes for found in listed} == written
    assert all(found.modified_s > 1_700_000_000 for found in listed)
    assert {found.path for found in blobs.list("c/q")} == {"c/q/deep/er"}
    assert list(blobs.list("nothing/here")) == []


def test_a_deleted_object_is_gone_and_its_neighbour_is_not(blobs: BlobStore) -> None:
    blobs.write("d/a", b"1")
    blobs.write("d/b", b"2")
    blobs.delete("d/a")
    assert not blobs.exists("d/a")
    assert [found.path for found in blobs.list()] == ["d/b"]


def test_deleting_the_last_object_and_what_is_not_there_is_fine(blobs: BlobStore) -> None:
    blobs.write("d/a", b"1")
    blobs.delete("d/a")
    blobs.delete("d/a")
    assert list(blobs.list()) == []
    blobs.write("d/b", b"2")
    assert blobs.read("d/b") == b"2"


def test_a_missing_object_says_which_and_where(blobs: BlobStore) -> None:
    blobs.write("c/there", b"1")
    with pytest.raises(MissingBlob, match="c/gone") as caught:
        blobs.read("c/gone")
    assert caught.value.where == str(blobs)


def test_a_store_survives_pickling(blobs: BlobStore) -> None:
    blobs.write("a", b"1")
    again: BlobStore = pickle.loads(pickle.dumps(blobs))  # noqa: S301 - our own bytes
    assert again.read("a") == b"1"
    assert str(again) == str(blobs)


@pytest.mark.parametrize(
    "path",
    ["", "/etc/passwd", "../a", "a/../../b", "a/..", "./a", "a//b", "a/", "a\0b"],
)
def test_a_path_cannot_leave_the_root(blobs: BlobStore, path: str) -> None:
    with pytest.raises(Bug):
        check_path(path)
    with pytest.raises(Bug):
        blobs.write(path, b"")
    with pytest.raises(Bug):
        blobs.open(path)
    with pytest.raises(Bug):
        blobs.delete(path)


@pytest.mark.parametrize("form", ["{0}/b", "file://{0}/b", "{0}/b/"])
def test_a_directory_is_a_store(tmp_path: Path, form: str) -> None:
    open_blobs(form.format(tmp_path)).write("x/y", b"1")
    assert (tmp_path / "b/x/y").read_bytes() == b"1"


def test_a_relative_directory_is_where_the_process_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    blobs = open_blobs("some dir")
    monkeypatch.chdir("/")
    blobs.write("x", b"1")
    assert (tmp_path / "some dir/x").read_bytes() == b"1"


@pytest.mark.parametrize("url", ["", "ftp://host/x", "http://user:hunter2@host/"])
def test_what_is_no_store_is_refused_with_the_known_ones(url: str) -> None:
    with pytest.raises(UsageError, match="s3://") as caught:
        open_blobs(url)
    assert "hunter2" not in str(caught.value)


def test_an_unknown_option_is_refused_without_the_secret() -> None:
    with pytest.raises(UsageError, match="bogus") as caught:
        open_blobs("s3://key:hunter2@bucket/x?bogus=1&region=us-east-1")
    assert "hunter2" not in str(caught.value)
    assert caught.value.__cause__ is None


def test_a_bucket_that_is_not_there_is_an_error_without_the_key(s3_url: str) -> None:
    blobs = open_blobs(s3_url.replace("@bucket", "@another"))
    with pytest.raises(Unavailable, match="another") as caught:
        blobs.write("x", b"1")
    assert SECRET_KEY not in str(caught.value) + repr(blobs)


def test_a_store_that_is_down_is_unavailable() -> None:
    blobs = open_blobs(
        f"s3://key:hunter2@bucket?endpoint_override=127.0.0.1:{free_port()}&scheme=http&region=us-east-1"
    )
    with pytest.raises(Unavailable) as caught:
        blobs.exists("x")
    assert "hunter2" not in str(caught.value)
    assert not isinstance(caught.value, MissingBlob)


def test_a_full_or_forbidden_disk_is_unavailable(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(Unavailable, match="cannot write") as caught:
        open_blobs(str(tmp_path / "file")).write("a/b", b"1")
    assert "file/a/b" in (caught.value.where or "")


def test_what_a_killed_writer_leaves_is_listed_as_garbage(tmp_path: Path) -> None:
    script = (
        "import os, sys; from penstock.journal.blobs import open_blobs\n"
        "with open_blobs(sys.argv[1]).create('c/x.parquet') as sink:\n"
        "    sink.write(b'1234'); sink.flush(); os._exit(9)\n"
    )
    ended = subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=False)
    assert ended.returncode == 9
    blobs = open_blobs(str(tmp_path))
    assert not blobs.exists("c/x.parquet")
    (left,) = blobs.list()
    blobs.delete(left.path)
    assert list(blobs.list()) == []
