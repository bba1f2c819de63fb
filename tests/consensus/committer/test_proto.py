"""The generated code is that of the protocol beside it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_generated_code_is_current(tmp_path: Path) -> None:
    script = [sys.executable, ROOT / "scripts" / "generate_protocols.py", tmp_path]
    made = subprocess.run(script, check=True, capture_output=True, text=True).stdout.split()
    assert "penstock/consensus/committer/proto/consensus_pb2.py" in made
    for name in made:
        fresh, kept = (tmp_path / name).read_text(), (ROOT / "src" / name).read_text()
        assert _without_versions(fresh) == _without_versions(kept), "run `make proto`"


def _without_versions(code: str) -> str:
    """Without the lines in which the compiler states its own version."""
    code = re.sub(r"# Protobuf Python Version: .*", "", code)
    return re.sub(r"Domain\.PUBLIC,\s+\d+,\s+\d+,\s+\d+,", "", code)
