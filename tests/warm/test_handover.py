"""Commands that are handed over to a host, as real processes; none of them needs Spark."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.warm import client, wire
from warm.hosting import CATALOG, SOON_S, Host, Place, eventually, is_running

pytestmark = pytest.mark.timeout(300)

STARTS = "starting Spark for this command alone: "


def a_place(directory: Path) -> Place:
    place = Place(directory)
    (directory / "catalog.yaml").write_text(json.dumps(CATALOG))
    done = place.run("apply", "catalog.yaml")
    assert done.returncode == 0, done.stderr
    place.append({"id": 1, "text": "é"}, {"id": 2})
    return place


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return a_place(tmp_path_factory.mktemp("place"))


@pytest.fixture(scope="module")
def host(place: Place) -> Iterator[Host]:
    """A host that tests leave as it is."""
    with place.host() as host:
        place.run("read", "acme/events")  # waits until the forker has imported everything
        yield host


def ids(printed: str) -> list[int]:
    return [json.loads(line)["id"] for line in printed.splitlines()]


@contextlib.contextmanager
def following(place: Place, host: Host) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A command that goes on until it is stopped, and the process that it runs in."""
    with place.command("read", "acme/events", "--follow") as command:
        assert command.stdout is not None
        try:
            assert ids(command.stdout.readline()) == [1]
            yield command, host.begun()
        finally:
            command.kill()


# ------------------------------------------------------------------------------------ handing over


def test_a_command_runs_elsewhere_and_prints_here(place: Place, host: Host) -> None:
    before = host.handed_over()
    done = place.run("read", "acme/events")
    assert (ids(done.stdout), done.stderr, done.returncode) == ([1, 2], "", 0)
    assert host.handed_over() == before + 1


def test_apply_is_handed_over_from_any_directory(place: Place, host: Host, tmp_path: Path) -> None:
    """It needs no Spark, whose tasks would see another one."""
    before = host.handed_over()
    done = place.run("apply", "catalog.yaml")
    assert done.returncode == 0, done.stderr
    assert host.handed_over() == before + 1
    catalog, data = str(place.directory / "catalog.yaml"), str(place.directory / ".penstock")
    done = place.run("apply", catalog, "--data", data, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert STARTS not in done.stderr
    assert host.handed_over() == before + 2


def test_own_spark_runs_it_here(place: Place, host: Host) -> None:
    before = host.handed_over()
    done = place.run("read", "acme/events", "--own-spark")
    assert (ids(done.stdout), done.returncode) == ([1, 2], 0)
    assert host.handed_over() == before


def test_errors_and_exit_codes_are_those_of_the_command(place: Place, host: Host) -> None:
    for arguments, code in ((("acme/none",), 1), (("acme/events", "--limit", "x"), 2)):
        elsewhere = place.run("read", *arguments)
        here = place.run("read", *arguments, "--own-spark")
        assert (elsewhere.returncode, elsewhere.stderr) == (code, here.stderr)
    assert host.handed_over() > 0


def test_a_crash_of_the_command_is_its_own(place: Place, host: Host) -> None:
    with following(place, host) as (command, process):
        os.kill(process, signal.SIGKILL)
        assert command.wait(SOON_S) == 128 + signal.SIGKILL
    assert ids(place.run("read", "acme/events").stdout) == [1, 2]


def test_what_a_command_reads_is_its_clients(place: Place, host: Host, tmp_path: Path) -> None:
    """Environment, directory and mask: another data directory, as seen from another place."""
    before = host.handed_over()
    (tmp_path / "catalog.yaml").write_text(json.dumps(CATALOG))
    name = os.path.relpath(place.directory / ".penstock", tmp_path)
    done = place.run("read", "acme/events", cwd=tmp_path, PENSTOCK_DATA=name)
    assert (ids(done.stdout), done.returncode) == ([1, 2], 0), done.stderr
    done = place.run("test", "catalog.yaml", "--junit", "junit.xml", "--data", name, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "junit.xml").exists()
    assert host.handed_over() == before + 2


def test_settings_in_a_file_say_where_the_host_is(place: Place, host: Host, tmp_path: Path) -> None:
    before = host.handed_over()
    (tmp_path / "penstock.toml").write_text(f'data = "{place.directory / ".penstock"}"\n')
    assert ids(place.run("read", "acme/events", cwd=tmp_path).stdout) == [1, 2]
    assert host.handed_over() == before + 1


def test_another_deployment_is_not_the_hosts(place: Place, host: Host, tmp_path: Path) -> None:
    before = host.handed_over()
    done = place.run("read", "acme/events", "--data", str(tmp_path))
    assert done.returncode == 1
    assert "there is no deployment here yet" in done.stderr
    assert host.handed_over() == before


def test_encodings_are_the_clients(place: Place, host: Host) -> None:
    assert "é" in place.run("read", "acme/events").stdout
    done = place.run("test", "catalog.yaml", PYTHONIOENCODING="ascii:replace")
    assert "ok   acme/tests/events" in done.stdout
    assert "✓" in place.run("test", "catalog.yaml", PYTHONIOENCODING="utf-8").stdout
    assert host.handed_over() > 0


def test_a_command_sees_the_terminal_of_its_client(place: Place, host: Host) -> None:
    """Colours are for terminals, and the other commands of this file have none."""
    before = host.handed_over()
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-m", "penstock", "test", "catalog.yaml"],
        cwd=place.directory,
        env={**place.environment, "TERM": "xterm-256color"},
        stdin=theirs,
        stdout=theirs,
        stderr=subprocess.DEVNULL,
    ) as command:
        os.close(theirs)
        printed = b""
        with contextlib.suppress(OSError):  # the terminal's way to say that nobody writes
            while more := os.read(ours, 4096):
                printed += more
        os.close(ours)
    assert command.returncode == 0
    assert b"\x1b[32m" in printed
    assert "\x1b" not in place.run("test", "catalog.yaml").stdout
    assert host.handed_over() == before + 2


def test_several_commands_run_at_once(place: Place, host: Host) -> None:
    with (
        following(place, host) as (first, _),
        following(place, host) as (second, _),
    ):
        assert len(host.commands) == 2
        first.send_signal(signal.SIGINT)
        assert first.wait(SOON_S) == 128 + signal.SIGINT
        assert second.poll() is None
        assert ids(place.run("read", "acme/events").stdout) == [1, 2]


def test_output_that_nobody_reads_any_more_ends_it(tmp_path: Path) -> None:
    place = a_place(tmp_path)
    with place.host() as host, following(place, host) as (command, process):
        assert command.stdout is not None
        command.stdout.close()
        place.append({"id": 3})
        place.append({"id": 4})
        eventually(lambda: not is_running(process), "it goes on without a reader")


# ---------------------------------------------------------------------------------------- stopping


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_client_stops_the_command(place: Place, host: Host, number: int) -> None:
    with following(place, host) as (command, process):
        command.send_signal(number)
        assert command.wait(SOON_S) == 128 + number
        eventually(lambda: not is_running(process), "the command goes on")


def test_a_client_that_is_killed_stops_the_command(place: Place, host: Host) -> None:
    with following(place, host) as (command, process):
        command.kill()
        command.wait()
        eventually(lambda: not is_running(process), "the command goes on")


def test_a_host_that_stops_stops_its_commands(tmp_path: Path) -> None:
    place = a_place(tmp_path)
    with place.host() as host, following(place, host) as (command, process):
        host.process.send_signal(signal.SIGTERM)
        assert command.wait(SOON_S) == 128 + signal.SIGTERM
        assert host.process.wait(SOON_S) == 0
        assert not is_running(process)
    assert not (place.directory / ".penstock" / wire.DIRECTORY / wire.SOCKET).exists()


def test_a_host_that_is_killed_ends_its_commands_and_the_next_one_takes_over(
    tmp_path: Path,
) -> None:
    place = a_place(tmp_path)
    with place.host() as host, following(place, host) as (command, process):
        forker = host.forker
        assert forker is not None
        host.kill()
        _, said = command.communicate(timeout=SOON_S)
        assert command.returncode == 1
        assert "has ended, and the command with it" in said
        eventually(lambda: not is_running(process), "the command goes on without Spark")
        eventually(lambda: not is_running(forker), "the forker goes on without a host")
    assert (tmp_path / ".penstock" / wire.DIRECTORY / wire.SOCKET).exists()
    done = place.run("read", "acme/events")  # a socket that nobody listens on
    assert (ids(done.stdout), done.stderr) == ([1, 2], "")
    with place.host() as host:
        assert ids(place.run("read", "acme/events").stdout) == [1, 2]
        assert host.handed_over() == 1


def test_a_forker_that_is_killed_is_started_again(tmp_path: Path) -> None:
    place = a_place(tmp_path)
    with place.host() as host:
        assert ids(place.run("read", "acme/events").stdout)
        first = host.forker
        assert first is not None
        os.kill(first, signal.SIGKILL)
        eventually(lambda: not is_running(first), "it was killed")
        done = place.run("read", "acme/events")
        assert ids(done.stdout)
        assert host.handed_over() == 2
        assert host.forker != first


# ------------------------------------------------------------------------------- what is not taken


def test_two_hosts_of_one_deployment_do_not_fight(place: Place, host: Host) -> None:
    with place.host() as other:
        assert "another process offers its Spark" in other.log()
    before = host.handed_over()
    assert ids(place.run("read", "acme/events").stdout)
    assert host.handed_over() == before + 1


def test_another_version_of_the_code_is_not_used(tmp_path: Path, place: Place) -> None:
    data = tmp_path / "data"
    with place.host("--changed", "--data", str(data)) as host:
        done = place.run("test", "catalog.yaml", "--data", str(data))
        assert done.returncode == 0
        assert f"{STARTS}the process that has one runs another version" in done.stderr
        assert host.handed_over() == 0


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a client hands over; pytest's own standard input is no file."""
    with Path(os.devnull).open() as nothing:
        monkeypatch.setattr(sys, "stdin", nothing)
        yield


@pytest.mark.usefixtures("streams")
def test_a_host_that_does_not_answer_is_not_waited_for_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / wire.DIRECTORY).mkdir()
    monkeypatch.setattr(client, "READY_S", 0.3)
    monkeypatch.setattr(client, "_REPORT_S", 0.1)
    with socket.socket(socket.AF_UNIX) as listener:
        with wire.address(str(tmp_path / wire.DIRECTORY)) as address:
            listener.bind(address)
        listener.listen()
        assert client.run_elsewhere(["read", "acme/events", "--data", str(tmp_path)]) is None
    said = capfd.readouterr().err.splitlines()
    assert said[0] == "waiting for the process that has Spark"
    assert "did not answer within 0.3 s" in said[1]


@pytest.mark.usefixtures("streams")
def test_what_does_not_fit_into_a_message_is_run_here(
    place: Place, host: Host, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    before = host.handed_over()
    data = str(place.directory / ".penstock")
    monkeypatch.setattr(wire, "MESSAGE_BYTES_MAX", 100)
    assert client.run_elsewhere(["read", "acme/events", "--data", data]) is None
    assert f"{STARTS}there would be a message of" in capfd.readouterr().err
    assert host.handed_over() == before


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(b"GET / HTTP/1.1\r\n\r\n", id="another protocol"),
        pytest.param(struct.pack("!I", wire.MESSAGE_BYTES_MAX + 1), id="too large a message"),
        pytest.param(struct.pack("!I", 2) + b"{}", id="no command"),
        pytest.param(struct.pack("!I", 100) + b"{", id="half of a message"),
        pytest.param(b"", id="nothing"),
    ],
)
def test_garbage_does_the_host_no_harm(place: Place, host: Host, sent: bytes) -> None:
    with socket.socket(socket.AF_UNIX) as bad:
        bad.settimeout(SOON_S)
        with wire.address(str(place.directory / ".penstock" / wire.DIRECTORY)) as address:
            bad.connect(address)
        bad.sendall(sent)
        bad.shutdown(socket.SHUT_WR)
        answer = b""
        with contextlib.suppress(ConnectionResetError):
            while more := bad.recv(4096):
                answer += more
        assert b"ready" not in answer
    assert ids(place.run("read", "acme/events").stdout)


def test_a_command_that_is_not_whole_is_refused(place: Place, host: Host) -> None:
    with socket.socket(socket.AF_UNIX) as bad:
        bad.settimeout(SOON_S)
        with wire.address(str(place.directory / ".penstock" / wire.DIRECTORY)) as address:
            bad.connect(address)
        channel = wire.Channel(bad)
        channel.send({**wire.identity(), "arguments": ["read"], "umask": "?"}, [0, 1, 2])
        answer = channel.receive()
        assert answer is not None
        assert "does not understand" in answer["refused"]
    assert host.process.poll() is None


def test_clients_that_say_nothing_do_not_keep_others_out(place: Place, host: Host) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(100):
            silent = stack.enter_context(socket.socket(socket.AF_UNIX))
            with contextlib.suppress(OSError):
                silent.settimeout(1)
                with wire.address(str(place.directory / ".penstock" / wire.DIRECTORY)) as address:
                    silent.connect(address)
        assert ids(place.run("read", "acme/events").stdout)  # here or there
    before = host.handed_over()
    until = time.monotonic() + SOON_S
    while host.handed_over() == before:
        assert ids(place.run("read", "acme/events").stdout)
        assert time.monotonic() < until
    assert host.process.poll() is None


# ------------------------------------------------------------------------------------- other users

needs_root = pytest.mark.skipif(os.getuid() != 0, reason="to be another user takes root")
NOBODY = 65534


@needs_root
def test_a_socket_of_another_user_is_told_nothing(place: Place, tmp_path: Path) -> None:
    """Whoever listens there would be given the client's environment."""
    warm = tmp_path / wire.DIRECTORY
    warm.mkdir()
    os.chown(warm, NOBODY, NOBODY)
    _let_others_enter(tmp_path)
    ready, told = os.pipe()
    heard, hears = os.pipe()
    child = os.fork()
    if child == 0:
        os.setuid(NOBODY)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(warm / wire.SOCKET))
            listener.listen()
            os.write(told, b"!")
            connection, _ = listener.accept()
            got = 0
            while more := connection.recv(4096):
                got += len(more)
            os.write(hears, str(got).encode())
        os._exit(0)
    assert os.read(ready, 1) == b"!"
    try:
        done = place.run("test", "catalog.yaml", "--data", str(tmp_path))
        assert done.returncode == 0
        assert f"is of another user ({NOBODY})" in done.stderr
        assert os.read(heard, 100) == b"0"
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        for each in (ready, told, heard, hears):
            os.close(each)


@needs_root
def test_another_user_who_reaches_the_socket_is_not_answered(tmp_path: Path) -> None:
    place = Place(tmp_path)
    with place.host() as host:
        warm = tmp_path / ".penstock" / wire.DIRECTORY
        assert warm.stat().st_mode & 0o777 == 0o700
        assert (warm / wire.SOCKET).stat().st_mode & 0o777 == 0o600
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(SOON_S)
            _as_nobody(connection, str(warm / wire.SOCKET))
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                wire.Channel(connection).send({**wire.identity(), "arguments": ["read"]}, [0, 1, 2])
                assert connection.recv(100) == b""
        assert host.handed_over() == 0


def _as_nobody(connection: socket.socket, path: str) -> None:
    """Connect as another user, who got past the directory."""
    for opened in (False, True):
        if opened:
            Path(path).chmod(0o666)
            _let_others_enter(Path(path).parent)
        os.setresuid(NOBODY, NOBODY, 0)
        try:
            with contextlib.nullcontext() if opened else pytest.raises(PermissionError):
                connection.connect(path)
        finally:
            os.setresuid(0, 0, 0)


def _let_others_enter(directory: Path) -> None:
    for each in (directory, *directory.parents):
        each.chmod(each.stat().st_mode | 0o011)


@needs_root
def test_a_directory_of_another_user_is_not_listened_in(tmp_path: Path) -> None:
    warm = tmp_path / ".penstock" / wire.DIRECTORY
    warm.mkdir(parents=True)
    os.chown(warm, NOBODY, NOBODY)
    with Place(tmp_path).host() as host:
        assert "it belongs to another user" in host.log()
    assert not (warm / wire.SOCKET).exists()
