"""A small program between Penstock and a package: it ends the package's process when asked to.

    python -I -S guard.py DIRECTORY COMMAND…

It leads the process group in which the command runs. Its standard input is a pipe that nobody
writes to: Penstock closes it to stop the command, and the kernel does if Penstock is killed. Then
the group gets SIGTERM, and SIGKILL after `KILL_S`; so no package outlives the capture that started
it. The directory, which holds the configuration, is removed with it.

It imports nothing of Penstock, so that it starts in no time.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time

TERM_S = 0.2
"""Seconds for a command that ends by itself at that moment."""

KILL_S = 10.0
"""Seconds that a command may take to end after SIGTERM."""


def main(directory: str, *command: str) -> int:
    """Run the command, and return its exit code as a shell would."""
    signal.signal(signal.SIGTERM, _ignore)  # a handler, which the command does not inherit
    signal.signal(signal.SIGINT, _ignore)
    try:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL)  # noqa: S603
    except OSError as error:
        sys.stderr.write(f"{command[0]}: {error.strerror}\n")
        return 127
    threading.Thread(target=_stop_at_end, args=(directory,), daemon=True).start()
    code = child.wait()
    shutil.rmtree(directory, ignore_errors=True)  # nobody else may be left to do it
    return code if code >= 0 else 128 - code


def _stop_at_end(directory: str) -> None:
    """Wait until standard input ends, and stop the group."""
    while os.read(0, 1 << 10):
        pass
    time.sleep(TERM_S)
    shutil.rmtree(directory, ignore_errors=True)
    _signal_group(signal.SIGTERM)
    time.sleep(KILL_S)
    _signal_group(signal.SIGKILL)


def _signal_group(number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(os.getpgid(0), number)


def _ignore(*_: object) -> None:
    """Leave it to the command."""


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
