"""The generated code is that of the protocol beside it."""

from __future__ import annotations

import re
from importlib import resources
from pathlib import Path

from grpc_tools import protoc

PACKAGE = "penstock.consensus.committer.proto"
NAMES = ("consensus_pb2.py", "consensus_pb2.pyi")


def test_generated_code_is_current(tmp_path: Path) -> None:
    source = Path(str(resources.files(PACKAGE))).parents[3]
    proto = f"{PACKAGE.replace('.', '/')}/consensus.proto"
    arguments = ["", f"-I{source}", f"--python_out={tmp_path}", f"--pyi_out={tmp_path}", proto]
    assert protoc.main(arguments) == 0
    for name in NAMES:
        made = (tmp_path / proto).with_name(name).read_text()
        kept = (source / proto).with_name(name).read_text()
        assert _without_versions(made) == _without_versions(kept), "run `make proto`"


def _without_versions(code: str) -> str:
    """Without the lines in which the compiler states its own version."""
    code = re.sub(r"# Protobuf Python Version: .*", "", code)
    return re.sub(r"Domain\.PUBLIC,\s+\d+,\s+\d+,\s+\d+,", "", code)
