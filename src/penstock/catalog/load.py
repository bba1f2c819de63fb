"""Load catalog files: follow imports, and resolve references to other files.

A catalog is a main file and its imports. Every path in it is relative to the file that holds it and
stays below the directory of a main file, so that a catalog can be copied, reviewed and trusted as a
whole. Each file is read once.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from os.path import normpath
from pathlib import Path
from urllib.parse import unquote

from penstock.catalog.diagnostics import Diagnostic, Diagnostics, FilePosition
from penstock.catalog.nodes import Node, parse, parse_json

FILE_BYTES_MAX = 64 << 20
IMPORT_DEPTH_MAX = 100
MAIN_NAMES = ("catalog.yaml", "catalog.yml", "flow.yaml")
"""Main files to look for, in this order, where a directory is given."""

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:")
_CODE_FILE = re.compile(r"[^\s]+\.(sql|py|ts)")


@dataclass(frozen=True, slots=True, eq=False)
class ResolvedReference:
    """The target of a reference, and the root of the file, or inline value, that holds it."""

    node: Node
    root: Node


@dataclass(frozen=True, slots=True, eq=False)
class Code:
    """Source code, in a file of its own or inline in a YAML file."""

    text: str
    node: Node
    file: str | None = None
    around: Sequence[str] = ()
    """The lines of the YAML file that holds inline code."""

    def position(self, offset: int) -> FilePosition:
        """Return where the character at `offset` is written, as exactly as possible."""
        before = self.text[:offset]
        line, column = before.count("\n"), offset - (before.rfind("\n") + 1)
        if self.file is not None:
            return FilePosition(self.file, line + 1, column + 1)
        written = self.text.split("\n")[line]
        # Code of several lines begins below its key, unless it was folded or quoted.
        number = self.node.at.line + line + ("\n" in self.text)
        source = self.around[number - 1] if number <= len(self.around) else ""
        if not written or written not in source:
            return self.node.at
        return FilePosition(self.node.at.file, number, source.index(written) + column + 1)


class Sources:
    """The files of a catalog. A file that cannot be read is reported and left out."""

    def __init__(self, diagnostics: Diagnostics, *, allow_outside: bool = False) -> None:
        self.diagnostics = diagnostics
        self.catalogs: list[Node] = []
        self._allow_outside = allow_outside
        self._tops: list[Path] = []
        self._parsed: dict[Path, Node | None] = {}
        self._texts: dict[Path, str | None] = {}

    def load(self, mains: Sequence[Path]) -> None:
        """Load the main files and everything that they import."""
        mains = [_main_file(m) for m in mains]
        self._tops = [m.resolve().parent for m in mains]
        loaded: set[Path] = set()
        for main in mains:
            start = FilePosition(str(main), 1, 1)
            nowhere = Node(None, start, start, "")
            self._load_catalog(main, nowhere, loaded, [])

    def _load_catalog(
        self, path: Path, importer: Node, loaded: set[Path], chain: list[Path]
    ) -> None:
        real = path.resolve()
        if real in [c.resolve() for c in chain]:
            self._report_cycle(path, importer, chain)
            return
        if real in loaded:
            return
        loaded.add(real)
        root = self._document(path, importer)
        if root is None:
            return
        self.catalogs.append(root)
        if len(chain) >= IMPORT_DEPTH_MAX:
            self.error(importer, "E-IMPORT", f"imports nest deeper than {IMPORT_DEPTH_MAX} files")
            return
        for url in self._import_urls(root):
            imported = self._path(url)
            if imported is not None:
                self._load_catalog(imported, url, loaded, [*chain, path])

    def _import_urls(self, root: Node) -> Iterator[Node]:
        imports = root.get("import")
        for item in imports.items if imports else ():
            kind = item.text_of("contentType") or "CATALOG"
            if kind != "CATALOG":
                message = f"an import of {kind} is accepted, but has no effect here"
                hint = "remove it: such files are read where the catalog names them"
                self.error(item, "W-NO-EFFECT", message, hint=hint)
                continue
            url = item.get("url") or item
            if url.text is not None:
                yield url

    def _report_cycle(self, path: Path, importer: Node, chain: list[Path]) -> None:
        first = [c.resolve() for c in chain].index(path.resolve())
        cycle = [str(c) for c in chain[first:]] + [str(chain[first])]
        if len(cycle) == 2:
            self.error(importer, "E-IMPORT", "this file imports itself", hint="remove the import")
            return
        self.error(
            importer,
            "W-IMPORT-CYCLE",
            f"imports form a cycle: {' → '.join(cycle)}",
            hint="harmless, because each file loads once; move shared parts to a third file",
        )

    # --- references ---

    def follow(self, node: Node) -> ResolvedReference | None:
        """Return the value that `node` stands for: itself, or the target of its relative URL."""
        if node.text is None:
            return ResolvedReference(node, node)
        return self.resolve(node, node.text)

    def resolve(self, node: Node, url: str) -> ResolvedReference | None:
        """Resolve `url`, a path relative to the file of `node` with an optional fragment."""
        path, _, fragment = url.partition("#")
        root = self.open(node, path)
        if root is None:
            return None
        found = find_fragment(root, unquote(fragment))
        if found is None:
            self.error(node, "E-IMPORT", f'"#{fragment}" is not in {root.at.file}')
            return None
        return ResolvedReference(found, root)

    def open(self, node: Node, path: str) -> Node | None:
        """Return the root of the file at `path`, which `node` mentions."""
        file = self._path(node, path)
        return self._document(file, node) if file is not None else None

    def lines(self, node: Node) -> Sequence[str]:
        """Return the lines of the file that holds a node."""
        return (self._texts.get(Path(node.at.file).resolve()) or "").split("\n")

    def code(self, node: Node) -> Code | None:
        """Return source code written inline, or the text of the file that `node` names."""
        if node.text is None:
            return None
        if not _CODE_FILE.fullmatch(node.text):
            return Code(node.text, node, around=self.lines(node))
        path = self._path(node)
        text = self._text(path, node) if path is not None else None
        return Code(text, node, file=str(path)) if text is not None else None

    def file(self, node: Node) -> Code | None:
        """Return the text of the file that `node` names, of whatever kind it is."""
        path = self._path(node) if node.text is not None else None
        text = self._text(path, node) if path is not None else None
        return Code(text, node, file=str(path)) if text is not None else None

    def error(
        self,
        node: Node,
        code: str,
        message: str,
        *,
        hint: str | None = None,
        see: Node | None = None,
        at: FilePosition | None = None,
    ) -> None:
        """Report a finding about `node`, at its value or at `at`."""
        self.diagnostics.report(
            Diagnostic(
                at=at or node.at,
                pointer=node.pointer,
                code=code,
                message=message,
                hint=hint,
                see=(see.key_at,) if see else (),
            )
        )

    # --- files ---

    def _path(self, node: Node, url: str | None = None) -> Path | None:
        """Return the path of a relative URL, if it may be followed."""
        url = node.text or "" if url is None else url
        if _SCHEME.match(url) or url.startswith("//"):
            self.error(
                node,
                "E-IMPORT",
                f"{_without_credentials(url)} is not a relative path",
                hint="remote files are not fetched: keep a copy beside the catalog",
            )
            return None
        path = Path(normpath(Path(node.at.file).parent / unquote(url)))
        try:
            real = path.resolve()
        except (OSError, ValueError, RuntimeError) as e:  # a zero byte, a loop of symbolic links
            self.error(node, "E-IMPORT", f"{url!r} is not a path: {e}")
            return None
        if not self._allow_outside and not any(real.is_relative_to(t) for t in self._tops):
            self.error(
                node,
                "E-IMPORT",
                f"{url} is outside the catalog's directory",
                hint="move it below the directory of the main file, or pass --allow-outside",
            )
            return None
        return path

    def _document(self, path: Path, importer: Node) -> Node | None:
        real = path.resolve()
        if real not in self._parsed:
            text = self._text(path, importer)
            read = parse_json if path.suffix == ".json" else parse
            self._parsed[real] = (
                read(text, str(path), self.diagnostics) if text is not None else None
            )
        return self._parsed[real]

    def _text(self, path: Path, importer: Node) -> str | None:
        real = path.resolve()
        if real not in self._texts:
            self._texts[real] = self._read(path, importer)
        return self._texts[real]

    def _read(self, path: Path, importer: Node) -> str | None:
        try:
            with path.open("rb") as file:
                data = file.read(FILE_BYTES_MAX + 1)
            if len(data) > FILE_BYTES_MAX:
                self.error(importer, "E-IMPORT", f"{path} is larger than {FILE_BYTES_MAX} bytes")
                return None
            return data.decode("utf-8-sig")
        except UnicodeDecodeError as e:
            line = e.object[: e.start].count(b"\n") + 1
            column = e.start - e.object.rfind(b"\n", 0, e.start)
            self.diagnostics.report(
                Diagnostic(
                    at=FilePosition(str(path), line, column),
                    pointer="",
                    code="E-YAML",
                    message=f"byte 0x{e.object[e.start]:02x} is not UTF-8",
                    hint="save the file as UTF-8",
                )
            )
        except OSError as e:
            reason = (
                (e.strerror or str(e)).lower().replace("no such file or directory", "no such file")
            )
            self.error(
                importer,
                "E-IMPORT",
                f"cannot read {path}: {reason}",
                hint=None
                if importer.value is None
                else "paths are relative to the file that contains them",
            )
        return None


def find_fragment(root: Node, fragment: str) -> Node | None:
    """Find a URL fragment: a JSON pointer, or the `$anchor` (or `$id: "#…"`) of a schema."""
    if not fragment or fragment.startswith("/"):
        return root.find(fragment)
    return next(
        (
            node
            for node in root.walk()
            if node.text_of("$anchor") == fragment or node.text_of("$id") == f"#{fragment}"
        ),
        None,
    )


def _main_file(path: Path) -> Path:
    if not path.is_dir():
        return path
    return next((path / n for n in MAIN_NAMES if (path / n).is_file()), path / MAIN_NAMES[0])


def _without_credentials(url: str) -> str:
    return re.sub(r"//[^/@]*@", "//", url)
