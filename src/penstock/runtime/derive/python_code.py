"""PURE: the code of a Python derivation, as text: what it defines, found without running it.

It is one module, or a project: `pyproject.toml` and the files of a package. The package is the
directory of the first `__init__.py`, and its parent is the directory that imports start from.
"""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from pathlib import PurePosixPath
from typing import Final, TypeAlias

from penstock.runtime.derive.mistakes import Mistake

CLASS: Final = "Derivation"
INLINE: Final = "_penstock_derivation"
"""The name of a module that is not part of a project."""
_KEPT: Final = ("__init__", "flush", "start_commit")
"""Methods of a class whose documents depend on each other."""

_SIGNATURES: Final = {
    "__init__": "self, open, config",
    "flush": "self, state_patches, flushed",
    "start_commit": "self, request",
    "reset": "self",
}

Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeFile:
    """One file that can be imported, as `module`."""

    module: str
    path: str | None
    """As the catalog writes it; None if the derivation has only this module."""
    text: str
    is_package: bool = False

    @property
    def place(self) -> str:
        return self.path or "the module"


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonCode:
    """The files of a derivation. `main` is the module that has the class."""

    files: tuple[CodeFile, ...]
    main: str

    def file(self, module: str) -> CodeFile | None:
        return next((f for f in self.files if f.module == module), None)

    @property
    def packages(self) -> frozenset[str]:
        """The names that imports of these files begin with."""
        return frozenset(f.module.partition(".")[0] for f in self.files)


def code_of(module: str | None, files: Sequence[tuple[str, str]]) -> PythonCode | None:
    """The code of a derivation: its module, or the project of these paths and texts.

    None if no file of a project is an `__init__.py` inside a directory.
    """
    if module is not None:
        return PythonCode(files=(CodeFile(module=INLINE, path=None, text=module),), main=INLINE)
    paths = [PurePosixPath(path) for path, _ in files]
    first = next((p.parent for p in sorted(paths, key=_depth) if _is_package(p)), None)
    if first is None:
        return None
    found = [
        _code_file(path.relative_to(first.parent), path, text)
        for path, (_, text) in zip(paths, files, strict=True)
        if path.suffix == ".py" and path.is_relative_to(first.parent)
    ]
    return PythonCode(files=tuple(found), main=first.name)


def _depth(path: PurePosixPath) -> int:
    return len(path.parts)


def _is_package(path: PurePosixPath) -> bool:
    return path.name == "__init__.py" and bool(path.parent.name)


def _code_file(relative: PurePosixPath, path: PurePosixPath, text: str) -> CodeFile:
    package = relative.name == "__init__.py"
    parts = relative.parent.parts if package else relative.with_suffix("").parts
    return CodeFile(module=".".join(parts), path=str(path), text=text, is_package=package)


# --- what it defines ---


@dataclass(frozen=True, kw_only=True, eq=False)
class DerivationClass:
    """The class of a derivation, as it is written."""

    file: CodeFile
    node: ast.ClassDef
    methods: dict[str, Function]
    """Its own, and those of bases that the same file defines."""
    whole: bool
    """False if it may have methods that cannot be seen: of other bases, or assigned."""

    @cached_property
    def stateful(self) -> bool:
        """True if what a document publishes may depend on documents before it."""
        return (
            not self.whole
            or any(name in self.methods for name in _KEPT)
            or any(_keeps(method) for method in self.methods.values())
        )

    @cached_property
    def persists(self) -> bool:
        """True if it keeps one state for all documents, as opposed to state by key."""
        flush = self.methods.get("flush")
        return "start_commit" in self.methods or (
            flush is not None and any(_sets_state(node) for node in ast.walk(flush))
        )


def _keeps(method: Function) -> bool:
    """True if a method changes attributes of its object, or names outside of it."""
    me = method.args.args[0].arg if method.args.args else "self"
    for node in ast.walk(method):
        match node:
            case ast.Global() | ast.Nonlocal():
                return True
            case ast.Attribute(value=ast.Name(id=name), attr=attr) if name == me:
                if attr == "keyed" or not isinstance(node.ctx, ast.Load):
                    return True
    return False


def _sets_state(node: ast.AST) -> bool:
    match node:
        case ast.Attribute(attr="state", ctx=ast.Store()):
            return True
        case ast.Return(value=ast.expr()):
            return any(
                isinstance(n, ast.keyword) and n.arg in {"state", "updated"} for n in ast.walk(node)
            )
        case _:
            return False


def parse(file: CodeFile) -> ast.Module | Mistake:
    """The syntax tree of a file, or why there is none."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # style is not checked here
            return ast.parse(file.text)
    except SyntaxError as e:
        line = e.lineno or 1
        before = file.text.split("\n")[: line - 1]
        offset = sum(len(text) + 1 for text in before) + max((e.offset or 1) - 1, 0)
        return Mistake(code="E-LAMBDA", offset=offset, message=f"line {line}: {e.msg}")
    except (ValueError, RecursionError, MemoryError) as e:
        return Mistake(code="E-LAMBDA", offset=0, message=str(e) or "too deeply nested")


def find_class(code: PythonCode, module: str | None = None) -> DerivationClass | None:
    """Find `Derivation` in the main module, or in the file of the project it is imported from."""
    file = code.file(module or code.main)
    tree = parse(file) if file else None
    if file is None or not isinstance(tree, ast.Module):
        return None
    classes = {n.name: n for n in tree.body if isinstance(n, ast.ClassDef)}
    if CLASS in classes:
        methods, whole = _methods(classes[CLASS], classes, frozenset())
        return DerivationClass(file=file, node=classes[CLASS], methods=methods, whole=whole)
    target = _imported_from(tree, file)
    return find_class(code, target) if target and target != file.module else None


def _methods(
    node: ast.ClassDef, classes: dict[str, ast.ClassDef], above: frozenset[str]
) -> tuple[dict[str, Function], bool]:
    methods: dict[str, Function] = {}
    whole = True
    for base in node.bases:
        named = base.value if isinstance(base, ast.Subscript) else base
        name = named.id if isinstance(named, ast.Name) else ""
        if name in classes and name not in above:
            inherited, known = _methods(classes[name], classes, above | {node.name})
            methods, whole = inherited | methods, whole and known
        elif name not in {"IDerivation", "object", "ABC", "Generic"}:
            whole = False
    whole = whole and not any(_assigns_a_method(n) for n in node.body)
    own = (n for n in node.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))
    return methods | {method.name: method for method in own}, whole


def _assigns_a_method(node: ast.stmt) -> bool:
    match node:
        case ast.Assign(value=ast.Constant()) | ast.AnnAssign() | ast.Expr() | ast.Pass():
            return False
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            return False
        case _:
            return True


def _imported_from(tree: ast.Module, file: CodeFile) -> str | None:
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and any(
            (alias.asname or alias.name) == CLASS for alias in node.names
        ):
            if not node.level:
                return node.module
            parts = file.module.split(".")
            parts = parts[: len(parts) - node.level + file.is_package]
            return ".".join([*parts, node.module] if node.module else parts)
    return None


# --- mistakes ---


def check(
    code: PythonCode, methods: Sequence[tuple[str, str]]
) -> Iterator[tuple[CodeFile, Mistake]]:
    """Yield what is wrong: syntax, the class, and the methods of transforms (transform, method)."""
    broken = [(f, tree) for f in code.files if isinstance(tree := parse(f), Mistake)]
    yield from broken
    if broken:
        return
    found = find_class(code)
    main = code.file(code.main)
    if found is None and main is not None:
        if not _may_define(main):
            yield main, _no_class(main, methods)
        return
    assert found is not None  # noqa: S101 - a project without its main module has no code
    for transform, name in methods:
        if name in found.methods:
            yield from _check_arguments(found, name, 1, 1, "the document it reads")
        elif found.whole:
            yield found.file, _no_method(found, transform, name)
    for name, signature in _SIGNATURES.items():
        given = signature.removeprefix("self").removeprefix(", ")
        yield from _check_arguments(found, name, 0, len(given.split()), given or "nothing")


def _may_define(file: CodeFile) -> bool:
    """True if the class may come from somewhere that cannot be read here."""
    tree = parse(file)
    body = tree.body if isinstance(tree, ast.Module) else ()
    for node in body:
        match node:
            case ast.ImportFrom(names=names):
                found = {alias.asname or alias.name for alias in names} & {CLASS, "*"}
            case ast.Assign(targets=targets):
                found = {t.id for t in targets if isinstance(t, ast.Name)} & {CLASS}
            case _:
                found = {CLASS} if isinstance(node, ast.If | ast.Try) else set()
        if found:
            return True
    return False


def _no_class(file: CodeFile, methods: Sequence[tuple[str, str]]) -> Mistake:
    tree = parse(file)
    body = tree.body if isinstance(tree, ast.Module) else []
    classes = [n for n in body if isinstance(n, ast.ClassDef)]
    first = f"def {methods[0][1]}(self, read): …" if methods else "…"
    if len(classes) == 1:
        at = _offset(file.text, classes[0].lineno, classes[0].col_offset)
        hint = f'rename the class "{classes[0].name}" to {CLASS}'
    else:
        at, hint = 0, f"write class {CLASS}(IDerivation): {first}"
    return Mistake(code="E-LAMBDA", offset=at, message=f'there is no class "{CLASS}"', hint=hint)


def _no_method(found: DerivationClass, transform: str, name: str) -> Mistake:
    known = [m for m in found.methods if not m.startswith("__")]
    close = get_close_matches(name, known, n=1, cutoff=0.6)
    return Mistake(
        code="E-LAMBDA",
        offset=_offset(found.file.text, found.node.lineno, found.node.col_offset),
        message=f'{CLASS} has no method "{name}" for transform "{transform}"',
        hint=f'rename "{close[0]}" to {name}' if close else f"add def {name}(self, read): …",
    )


def _check_arguments(
    found: DerivationClass, name: str, least: int, most: int, given: str
) -> Iterator[tuple[CodeFile, Mistake]]:
    """A method must be callable with some number of arguments from `least` to `most`."""
    method = found.methods.get(name)
    if method is None or method.decorator_list or not _is_inside(found, method):
        return
    arguments = method.args
    positional = len(arguments.posonlyargs) + len(arguments.args) - 1
    needed = positional - len(arguments.defaults)
    needs_named = any(default is None for default in arguments.kw_defaults)
    if positional < 0:
        message = f"{name} has no argument self"
    elif needed > most or needs_named:
        message = f"{name} takes more arguments than it is given: {given}"
    elif positional < least and arguments.vararg is None:
        message = f"{name} takes no argument, but is given {given}"
    else:
        return
    at = _offset(found.file.text, method.lineno, method.col_offset)
    hint = f"def {name}({_SIGNATURES.get(name, 'self, read')})"
    yield found.file, Mistake(code="E-LAMBDA", offset=at, message=message, hint=hint)


def _is_inside(found: DerivationClass, method: Function) -> bool:
    return method in found.node.body


def _offset(text: str, line: int, column: int) -> int:
    """The offset of a place; columns count bytes, as in syntax trees."""
    lines = text.split("\n")
    start = sum(len(before) + 1 for before in lines[: line - 1])
    inside = lines[line - 1].encode()[:column].decode(errors="ignore") if line <= len(lines) else ""
    return start + len(inside)
