"""Tells captures when something changes below their directories: one thread for all of a process.

A watcher cannot be given another directory while it runs. When captures come or go it is replaced,
and all of them list their files once, since something may have changed in between. Nothing depends
on it but the time until a file is noticed: captures also list their files now and then.
"""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Final

_log = logging.getLogger("penstock.runtime")

_STEP_MS: Final = 50
_DEBOUNCE_MS: Final = 50
_LOOK_MS: Final = 1_000
_GATHER_S: Final = 0.2
"""Seconds in which captures may come or go, for one replacement."""


class Watch:
    """A capture's interest in a directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._woken = threading.Event()
        _watcher.add(self)

    def wait(self, seconds: float) -> bool:
        """Wait for a change, or until woken, or for this long; true unless the time is over."""
        woken = self._woken.wait(seconds)
        self._woken.clear()
        return woken

    def wake(self) -> None:
        """Let `wait` return."""
        self._woken.set()

    def close(self) -> None:
        """Take no more interest in it."""
        _watcher.remove(self)


class _Watcher:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._watches: list[Watch] = []
        self._replaced = threading.Event()
        """Set when there are other watches than those that are being served."""
        self._thread: threading.Thread | None = None

    def add(self, watch: Watch) -> None:
        with self._lock:
            self._watches.append(watch)
            self._replaced.set()
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="penstock-files", daemon=True
                )
                self._thread.start()

    def remove(self, watch: Watch) -> None:
        with self._lock:
            self._watches.remove(watch)
            self._replaced.set()

    def _run(self) -> None:
        gather = threading.Event()
        while True:
            gather.wait(_GATHER_S)
            with self._lock:
                watches = list(self._watches)
                self._replaced.clear()
                if not watches:
                    self._thread = None
                    return
            self._serve(watches)
            self._replaced.wait()

    def _serve(self, watches: list[Watch]) -> None:
        """Wake watches until there are others, or their directories cannot be watched."""
        from watchfiles import watch

        present = [each for each in watches if each.directory.is_dir()]
        if not present:
            return
        changes = watch(
            *{each.directory for each in present},
            watch_filter=None,
            stop_event=self._replaced,
            debounce=_DEBOUNCE_MS,
            step=_STEP_MS,
            yield_on_timeout=True,
            rust_timeout=_LOOK_MS,
            raise_interrupt=False,
        )
        try:
            next(changes, None)  # it watches by now, and nothing is missed from here on
            for each in present:
                each.wake()
            for changed in changes:
                for each in _concerned(present, [path for _, path in changed]):
                    each.wake()
        except (OSError, RuntimeError) as error:
            _log.warning("new files are noticed later: directories cannot be watched: %s", error)


def _concerned(watches: list[Watch], paths: list[str]) -> list[Watch]:
    """Return the watches of directories in which these paths are; all, if there are none."""
    found = [
        each for each in watches if any(Path(path).is_relative_to(each.directory) for path in paths)
    ]
    return found or (watches if paths else [])


_watcher: Final = _Watcher()
