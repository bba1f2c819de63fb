"""PURE: the module of a capture in Python, as text: what it defines, found without running it."""

from __future__ import annotations

import ast
import re
import warnings
from typing import Final

from penstock.runtime.derive.mistakes import Mistake

CLASS: Final = "Capture"
FUNCTION: Final = "read"
DLT: Final = "dlt:"

_DLT: Final = re.compile(r"dlt:\s*[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*\s*")
_HINT: Final = "write def read(config, state): yield 'orders', rows"


def check(text: str) -> Mistake | None:
    """Find what is wrong with a module: its syntax, `read`, or a class `Capture` that has it."""
    if text.startswith(DLT):
        return None if _DLT.fullmatch(text) else _mistake(0, "names no dlt resource", _DLT_HINT)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # style is not checked here
            tree = ast.parse(text)
    except SyntaxError as error:
        line = error.lineno or 1
        at = _offset(text, line, max((error.offset or 1) - 1, 0))
        return _mistake(at, f"line {line}: {error.msg}", None)
    except (ValueError, RecursionError, MemoryError) as error:
        return _mistake(0, str(error) or "too deeply nested", None)
    return _check_body(tree.body, text)


_DLT_HINT: Final = "write dlt:package.module:resource"


def _check_body(body: list[ast.stmt], text: str) -> Mistake | None:
    for node in body:
        match node:
            case ast.ClassDef(name=name) if name == CLASS:
                return _check_class(node, text)
            case ast.FunctionDef(name=name) if name == FUNCTION:
                return _check_arguments(node, text, ("config", "state"))
            case ast.AsyncFunctionDef(name=name) if name == FUNCTION:
                message = "read is async; write it as an ordinary generator"
                return _mistake(_at(node, text), message, _HINT)
    if any(_may_define(node) for node in body):
        return None
    message = f"there is no function {FUNCTION}, and no class {CLASS}"
    return _mistake(0, message, _HINT)


def _check_class(node: ast.ClassDef, text: str) -> Mistake | None:
    for method in node.body:
        if isinstance(method, ast.FunctionDef) and method.name == FUNCTION:
            return _check_arguments(method, text, ("self", "state"))
    if node.bases or any(_may_define(each) for each in node.body):
        return None
    message = f"{CLASS} has no method {FUNCTION}"
    return _mistake(_at(node, text), message, "add def read(self, state): yield 'orders', rows")


def _check_arguments(node: ast.FunctionDef, text: str, given: tuple[str, ...]) -> Mistake | None:
    """A function must be callable with what it is given."""
    arguments = node.args
    if node.decorator_list or arguments.vararg is not None:
        return None
    positional = len(arguments.posonlyargs) + len(arguments.args)
    needed = positional - len(arguments.defaults)
    named = any(default is None for default in arguments.kw_defaults)
    if needed <= len(given) <= positional and not named:
        return None
    message = f"{FUNCTION} is called with {' and '.join(given)}, and takes other arguments"
    return _mistake(_at(node, text), message, f"def {FUNCTION}({', '.join(given)})")


def _may_define(node: ast.stmt) -> bool:
    """True if `read` or `Capture` may come from somewhere that cannot be read here."""
    wanted = {CLASS, FUNCTION}
    match node:
        case ast.ImportFrom(names=names):
            return bool({alias.asname or alias.name for alias in names} & {*wanted, "*"})
        case ast.Assign(targets=targets):
            return bool({t.id for t in targets if isinstance(t, ast.Name)} & wanted)
        case ast.If() | ast.Try() | ast.With():
            return True
        case _:
            return False


def _mistake(offset: int, message: str, hint: str | None) -> Mistake:
    return Mistake(code="E-CAPTURE", offset=offset, message=message, hint=hint)


def _at(node: ast.stmt, text: str) -> int:
    return _offset(text, node.lineno, node.col_offset)


def _offset(text: str, line: int, column: int) -> int:
    before = text.split("\n")[: line - 1]
    return sum(len(each) + 1 for each in before) + column
