"""Loads the code of a Python derivation into this process, from memory.

Its modules are in `sys.modules` while it is *active*: the types module under the collection's name,
with the packages around it, and the files of a project. Activating another derivation takes them
out and puts its own in, so that two of them may have packages, or collections, of equal names. A
package that is really installed is never replaced: the types of `json/totals` are `json.totals`
beside the library's `json`.

`print` in these modules writes to standard error: standard output may carry something else.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import linecache
import sys
import threading
import traceback
import types
from collections.abc import Iterator, Sequence
from typing import Any, Final

import pydantic

from penstock.runtime.derive.engine import LambdaFailed
from penstock.runtime.derive.python_code import CLASS, CodeFile, PythonCode
from penstock.runtime.derive.python_names import module_name

_ERRORS_SHOWN: Final = 3

_lock = threading.RLock()
_active: LoadedCode | None = None


class LoadedCode:
    """The modules of one derivation in this process."""

    def __init__(
        self,
        collection: str,
        code: PythonCode,
        types_module: types.ModuleType,
        packages: str | None,
    ) -> None:
        self.collection = collection
        self._code = code
        self._finder = _Finder(collection, code)
        self._packages = packages
        self.loops: list[asyncio.AbstractEventLoop] = []
        """Event loops that no transaction uses. What the module keeps may belong to one of them."""
        atexit.register(self._close_loops)
        self._modules: dict[str, types.ModuleType] = {types_module.__name__: types_module}
        with self.active():
            self.derivation = self._load()

    def _close_loops(self) -> None:
        for loop in self.loops:
            loop.close()

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Let imports find this derivation's modules, until another derivation is active."""
        with _lock:
            self._activate()
        yield

    def _activate(self) -> None:
        global _active
        if _active is self:
            return
        if _active is not None:
            _active._retire()  # noqa: SLF001
        types_name = next(iter(self._modules))
        for parent in _parents(types_name):
            if parent not in self._modules and not _is_installed(parent):
                package = types.ModuleType(parent)
                package.__path__ = []
                self._modules[parent] = package
        for name, module in self._modules.items():
            parent, _, child = name.rpartition(".")
            if parent in self._modules:
                setattr(self._modules[parent], child, module)
        sys.modules.update(self._modules)
        sys.meta_path.insert(0, self._finder)
        if self._packages is not None and self._packages not in sys.path:
            sys.path.append(self._packages)
        _active = self

    def _retire(self) -> None:
        mine = self._code.packages
        names = [
            name for name in sys.modules if name in self._modules or name.partition(".")[0] in mine
        ]
        for name in names:
            self._modules[name] = sys.modules.pop(name)
        sys.meta_path.remove(self._finder)
        if self._packages in sys.path:
            sys.path.remove(self._packages)

    def _load(self) -> type[Any]:
        try:
            module = importlib.import_module(self._code.main)
        except ModuleNotFoundError as e:
            raise self._missing(e) from e
        except (Exception, SystemExit) as e:
            raise self.failed(e, "the module cannot be loaded") from e
        found = getattr(module, CLASS, None)
        if not isinstance(found, type):
            raise LambdaFailed(
                f"the module of {self.collection} has no class {CLASS}",
                fix=f"write class {CLASS}(IDerivation), with a method for each transform",
            )
        return found

    def _missing(self, error: ModuleNotFoundError) -> LambdaFailed:
        name = (error.name or "").partition(".")[0]
        types_name = module_name(self.collection)
        if name == types_name.partition(".")[0]:
            fix = f"the types of {self.collection} are in the module {types_name}"
        else:
            fix = f"add {name} to dependencies of using: python, then penstock run --install"
        return LambdaFailed(
            f"{self.collection} imports {error.name}, which is not installed",
            where=self.line_of(error),
            fix=fix,
        )

    def failed(self, error: BaseException, what: str, read: int | None = None) -> LambdaFailed:
        """The failure of user code: what failed, the line, and what the exception says."""
        failure = LambdaFailed(
            f"{self.collection}: {what}", where=self.line_of(error), why=_text(error)
        )
        failure.read = read
        return failure

    def line_of(self, error: BaseException) -> str | None:
        """The innermost line of the derivation's code that an exception went through."""
        if isinstance(error, SyntaxError) and error.filename in self._finder.places:
            return f"line {error.lineno} of {self._finder.places[error.filename]}"
        frames = [
            frame
            for frame in traceback.extract_tb(error.__traceback__)
            if frame.filename in self._finder.places
        ]
        if not frames:
            return None
        last = frames[-1]
        written = f": {last.line}" if last.line else ""
        return f"line {last.lineno} of {self._finder.places[last.filename]}{written}"


def _text(error: BaseException) -> str:
    if isinstance(error, pydantic.ValidationError):
        found = error.errors(include_url=False, include_input=False, include_context=False)
        shown = [f"{'/'.join(map(str, e['loc']))}: {e['msg']}" for e in found[:_ERRORS_SHOWN]]
        more = [f"and {len(found) - _ERRORS_SHOWN} more"] if len(found) > _ERRORS_SHOWN else []
        return f"{error.title} is not valid: {'; '.join(shown + more)}"
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.InspectLoader):
    """Finds the files of one derivation, which are kept in memory."""

    def __init__(self, collection: str, code: PythonCode) -> None:
        self._files = {file.module: file for file in code.files}
        self._names = {
            file.module: f"<{collection}: {file.path or 'module'}>" for file in code.files
        }
        self.places = {self._names[file.module]: file.place for file in code.files}
        """How messages call each file, by the name it is compiled with."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: types.ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        file = self._files.get(fullname)
        if file is None:
            return None
        return importlib.util.spec_from_loader(fullname, self, is_package=file.is_package)

    def get_source(self, fullname: str) -> str:
        return self._files[fullname].text

    def is_package(self, fullname: str) -> bool:
        return self._files[fullname].is_package

    def exec_module(self, module: types.ModuleType) -> None:
        file: CodeFile = self._files[module.__name__]
        name = self._names[module.__name__]
        lines = file.text.splitlines(keepends=True)
        linecache.cache[name] = (len(file.text), None, lines, name)
        vars(module)["print"] = _print_to_stderr
        exec(compile(file.text, name, "exec", dont_inherit=True), vars(module))  # noqa: S102


def _print_to_stderr(*values: object, **options: Any) -> None:  # noqa: ANN401 - as print's own
    print(*values, **{"file": sys.stderr, **options})  # noqa: T201 - the user's own


def _parents(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:length]) for length in range(1, len(parts))]


def _is_installed(name: str) -> bool:
    try:
        return name in sys.modules or importlib.util.find_spec(name) is not None
    except (ImportError, ValueError, AttributeError):
        return False
