"""`python -m penstock.cli.child COMMAND …`: a command that ends with the process that started it.

`servicekit.children` starts it, with a pipe as standard input: the pipe ends with its writer.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import Final

from penstock.servicekit.children import Child
from penstock.settings import Settings

_MODULE: Final = "penstock.cli.child"


def command(name: str, settings: Settings, *arguments: str) -> Child:
    """A command as a child of this process, with the settings of this one but for the catalog.

    Stores are named in the environment: their URLs may hold passwords, and others see arguments.
    """
    env = {
        **os.environ,
        "PENSTOCK_DATA": str(settings.data),
        "PENSTOCK_CONSENSUS": settings.consensus,
        "PENSTOCK_BLOB": settings.blob,
        "PENSTOCK_MASTER": settings.master,
        "PENSTOCK_LOG_LEVEL": "debug" if settings.debug else settings.log_level,
        "PENSTOCK_LOG_JSON": "1" if settings.log_json else "0",
        "PENSTOCK_JSON": "0",
    }
    env.pop("PENSTOCK_CATALOG", None)
    conf = [part for key, value in settings.conf.items() for part in ("--conf", f"{key}={value}")]
    return Child(name, [sys.executable, "-m", _MODULE, *arguments, *conf], env)


def _end_with_parent() -> None:
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def main() -> None:
    """Run a command."""
    from penstock.cli import main as commands

    threading.Thread(target=_end_with_parent, daemon=True).start()
    commands.main()


if __name__ == "__main__":
    main()
