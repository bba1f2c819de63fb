"""What a process does whose Spark has died."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from penstock.cli import hosting
from penstock.engine import SparkLost, spark_is_lost
from penstock.settings import Settings
from support.deployments import SOON_S, deployed


@pytest.fixture
def jvm(monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[bytes]]:
    """A process that stands for the JVM."""
    from pyspark import SparkContext

    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    monkeypatch.setattr(SparkContext, "_gateway", SimpleNamespace(proc=process))
    yield process
    process.kill()
    process.communicate()


async def test_it_ends_its_tasks_at_once_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jvm: subprocess.Popen[bytes]
) -> None:
    monkeypatch.setattr(hosting, "_LOOK_S", 0.01)
    stopped = asyncio.Event()
    stops = list[None]()

    def stop() -> None:
        stops.append(None)
        stopped.set()

    async with deployed(tmp_path) as here:
        world = await here.world()

        async def run() -> None:
            here_too = Settings(data=tmp_path)
            async with hosting.spark(here_too, world, stop, shared=False):
                await asyncio.sleep(0.1)
                assert not stops
                jvm.send_signal(signal.SIGKILL)
                await stopped.wait()

        with pytest.raises(SparkLost, match="JVM has ended") as lost:
            await asyncio.wait_for(run(), SOON_S)
        assert len(stops) == 2  # at once
        assert lost.value.exit_code == 5
        assert lost.value.fix


def test_a_jvm_is_lost_if_it_was_there(jvm: subprocess.Popen[bytes]) -> None:
    assert not spark_is_lost()
    jvm.kill()
    jvm.wait()
    assert spark_is_lost()
