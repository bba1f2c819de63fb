"""Who runs the tasks of a deployment: one `up` for each data directory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import penstock
from penstock.deployment import refuse_beside_up, running_up
from penstock.errors import UserError
from penstock.settings import Settings


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings.resolve({"data": tmp_path / "store"}, {})


def test_a_second_up_is_refused_and_named_the_first(settings: Settings) -> None:
    with running_up(settings):
        with pytest.raises(UserError, match="penstock up runs here already") as refused:
            running_up(settings).__enter__()
        assert f"process {os.getpid()}, since 2" in str(refused.value)
    with running_up(settings):
        pass  # the first has ended


def test_its_tasks_are_not_run_beside_it(settings: Settings) -> None:
    refuse_beside_up(settings, ["acme/a"])  # there was none so far, not even a directory
    with running_up(settings):
        with pytest.raises(UserError, match="penstock up runs acme/a and 1 more"):
            refuse_beside_up(settings, ["acme/a", "acme/b"])
        refuse_beside_up(settings, [])  # others may be run
        with penstock.open(data=settings.data) as opened:
            opened.apply(_catalog(settings.data.parent))
            with pytest.raises(UserError, match="penstock up runs acme/files"):
                opened.run()
    refuse_beside_up(settings, ["acme/a"])


def test_one_that_was_killed_leaves_no_lock(settings: Settings) -> None:
    program = (
        "import sys\n"
        "from pathlib import Path\n"
        "from penstock.deployment import running_up\n"
        "from penstock.settings import Settings\n"
        "with running_up(Settings.resolve({'data': Path(sys.argv[1])}, {})):\n"
        "    print('runs', flush=True)\n"
        "    sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(settings.data)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"runs\n"
        with pytest.raises(UserError, match=f"process {other.pid}"):
            refuse_beside_up(settings, ["acme/a"])
        other.kill()
    refuse_beside_up(settings, ["acme/a"])


def _catalog(directory: Path) -> Path:
    path = directory / "catalog.yaml"
    path.write_text(
        "collections: {acme/a: {key: [/id], schema: {type: object, required: [id], "
        "properties: {id: {type: integer}}}}}\n"
        "captures: {acme/files: {endpoint: {connector: {image: penstock/source-files, "
        "config: {path: .}}}, bindings: [{resource: {path: '*.jsonl'}, target: acme/a}]}}\n"
    )
    return path
