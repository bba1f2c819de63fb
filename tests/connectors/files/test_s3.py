"""Files in a bucket: the same documents, and no word of the credentials."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow.fs
import pytest

from penstock.connectors.files.formats import FilePart, FileReading, read_split
from penstock.connectors.files.places import FilePlace
from penstock.connectors.files.source import Files
from penstock.runtime.connector.common import ConnectorError
from support.s3 import BUCKET, SECRET_KEY, running_s3


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    with running_s3() as url:
        system, _ = pyarrow.fs.FileSystem.from_uri(url)
        for name, text in (
            ("incoming/orders/a.jsonl", b'{"id": 1}\n{"id": 2}\n'),
            ("incoming/orders/b.jsonl", b'{"id": 3}\n'),
            ("incoming/_staging/c.jsonl", b'{"id": 4}\n'),
            ("other/d.jsonl", b'{"id": 5}\n'),
        ):
            with system.open_output_stream(f"{BUCKET}/{name}") as out:
                out.write(text)
        yield url


def below(bucket: str, prefix: str) -> str:
    return bucket.replace("?", f"/{prefix}?")


def test_files_of_a_prefix_are_listed_and_read(bucket: str) -> None:
    place = FilePlace.of(below(bucket, "incoming"))
    found = sorted(place.list("orders/*.jsonl"), key=lambda each: each.path)
    assert [(each.path, each.size) for each in found] == [
        ("orders/a.jsonl", 20),
        ("orders/b.jsonl", 10),
    ]
    assert [each.path for each in place.list("")] == [each.path for each in place.list("orders")]
    reading = FileReading(place=place, format=None)
    documents = [d for each in found for d in read_split(reading, FilePart(file=each))]
    texts = [text for each in documents for text in each.texts or ()]
    assert texts == [b'{"id": 1}', b'{"id": 2}', b'{"id": 3}']
    assert documents[0].origin(1) == f"s3://{BUCKET}/incoming/orders/a.jsonl:2"


def test_a_directory_can_be_discovered(bucket: str) -> None:
    files = Files({"path": below(bucket, "incoming")}, where="capture acme/files")
    (found,) = files.discover()
    assert found.resource == {"path": "orders/*.jsonl"}


def test_no_error_shows_the_key(bucket: str) -> None:
    place = FilePlace.of(bucket.replace(f"@{BUCKET}", "@another"))
    with pytest.raises(ConnectorError) as caught:
        place.open("none.jsonl")
    assert "another" in str(caught.value)
    for text in (str(caught.value), repr(place)):
        assert SECRET_KEY not in text
        assert "s3cr" not in text
