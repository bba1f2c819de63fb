"""How fast the tail of the log is read, beside a loop that only receives it.

    python -m connectors.postgres_cdc.measure DOCUMENTS DOCUMENTS_PER_TRANSACTION

Prints documents by second, and by second of this process's CPU, for three rounds of each.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import psycopg

from connectors.postgres_cdc.changing import Driver, changing_postgres, ran
from penstock.connectors.postgres_cdc import wire
from penstock.connectors.postgres_cdc.replication import Replication
from penstock.runtime.connector.capture import CaptureSequence

TABLE = (
    "CREATE TABLE items (id bigint PRIMARY KEY, customer int, name text, price numeric(10, 2), "
    "at timestamptz, paid boolean)"
)
INSERT = (
    "INSERT INTO items SELECT i, i % 1000, 'name of ' || i, i * 1.01, now(), i % 2 = 0 "
    "FROM generate_series({}, {}) i"
)


def received(driver: Driver, lsn: int, publication: str, documents: int) -> None:
    """Only receive the frames of the log."""
    replication = Replication(driver.source.server)
    replication.start("bare", lsn, publication)
    count = 0
    while count < documents:
        size, data = replication.frames(1)
        if size == 0:
            replication.wait(time.monotonic() + 1)
        elif data[0] == wire.XLOG_DATA and data[wire.MESSAGE_AT] == wire.INSERT:
            count += 1
    replication.close()


def tailed(driver: Driver, documents: int) -> None:
    """Make the documents of all sequences, and commit none."""
    session = driver.open()
    count = 0
    while count < documents:
        polled = session.poll(0.5)
        if isinstance(polled, CaptureSequence):
            count += polled.given_documents
            count += sum(sum(read.rows_max or ()) for read in polled.reads)
    session.close()


def timed(work: Callable[[], None], documents: int) -> str:
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    work()
    seconds, cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
    return f"{documents / seconds:9,.0f}/s {documents / cpu_s:9,.0f}/CPU s"


def main() -> None:
    documents, each = int(sys.argv[1]), int(sys.argv[2])
    with changing_postgres("synchronous_commit = off", "max_wal_size = 4GB") as server:
        url = server.create_database()
        ran(url, TABLE)
        driver = Driver(url, ["items"])
        driver.run()
        bare = Replication(driver.source.server)
        bare.create_slot("bare", temporary=False)
        created = bare.created(time.monotonic() + 60)
        bare.close()
        with psycopg.connect(url, autocommit=True) as connection:
            row = connection.execute("SELECT pubname FROM pg_publication").fetchone()
            for first in range(0, documents, each):
                connection.execute(INSERT.format(first, first + each - 1).encode())
        if created is None or row is None:
            raise SystemExit("the server has made no slot, or no publication")
        lsn, publication = created[0], str(row[0])
        for _ in range(3):
            bare_rate = timed(lambda: received(driver, lsn, publication, documents), documents)
            tail_rate = timed(lambda: tailed(driver, documents), documents)
            print(f"received {bare_rate}   tailed {tail_rate}")  # noqa: T201


if __name__ == "__main__":
    main()
