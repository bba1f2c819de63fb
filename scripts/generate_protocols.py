"""Generate the Python code of every protocol under src/, beside its .proto file.

scripts/generate_protocols.py [DIRECTORY]    write to another directory, to compare
"""

from __future__ import annotations

import sys
from pathlib import Path

from grpc_tools import protoc

SOURCE = Path(__file__).resolve().parents[1] / "src"


def generate(out: Path) -> list[Path]:
    """Generate into `out`, and return the files relative to it.

    Names in the generated code follow from the paths under src/.
    """
    protos = sorted(path.relative_to(SOURCE) for path in SOURCE.rglob("*.proto"))
    arguments = ["", f"-I{SOURCE}", f"--python_out={out}", f"--pyi_out={out}", *map(str, protos)]
    if protoc.main(arguments) != 0:
        raise SystemExit("protoc failed, see above")
    return [p.with_name(f"{p.stem}_pb2{suffix}") for p in protos for suffix in (".py", ".pyi")]


if __name__ == "__main__":
    for made in generate(Path(sys.argv[1]) if len(sys.argv) > 1 else SOURCE):
        print(made)  # noqa: T201
