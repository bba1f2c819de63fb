"""The `penstock` script, and `python -m penstock` where the script is not on the path."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line: in a process that has Spark, where there is one, or in this one.

    Only then is anything else imported: most of the time of a short command would go there.
    """
    try:
        from penstock.warm.client import run_elsewhere

        code = run_elsewhere(sys.argv[1:])
        if code is not None:
            sys.exit(code)
        from penstock.cli.main import main as run_here
    except KeyboardInterrupt:
        sys.stderr.write("penstock: stopped; nothing was begun\n")
        sys.exit(130)
    run_here()


if __name__ == "__main__":
    main()
