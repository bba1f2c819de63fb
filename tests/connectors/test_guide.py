"""The sinks of `docs/guides/add-a-sink.md`, as they are printed there, through the suite."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path

GUIDE = Path(__file__).parents[2] / "docs/guides/add-a-sink.md"


def _load(name: str) -> types.ModuleType:
    """Import the blocks of the guide that make one file, as a module of the file's name."""
    blocks = re.findall(rf"```python {name}\.py\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    assert blocks, name
    module = types.ModuleType(name)
    sys.modules[name] = module  # the other file imports it, and pickles find it
    exec(compile("\n\n".join(blocks), f"{GUIDE.name}: {name}.py", "exec"), module.__dict__)  # noqa: S102
    return module


_load("json_sink")
_load("plain_sqlite")
TestJsonSink = _load("test_json_sink").TestJsonSink
TestPlainSqlite = _load("test_plain_sqlite").TestPlainSqlite
