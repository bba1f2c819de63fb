"""The errors that users see.

    PenstockError         says what, where, why and how to fix it; printed without a stack trace
    ├── UserError         a mistake in the input: catalog, document, option (exit 1)
    │   └── UsageError    a wrong command line (exit 2)
    ├── Unavailable       something outside is missing or refuses: Java, a database, a disk
    └── Bug               an invariant of Penstock does not hold: please report it

The outcomes of operations on the consensus store are in `penstock.consensus.store`.
"""

from __future__ import annotations


class PenstockError(Exception):
    """An error for users: what happened, then where, why and what to do about it.

    It never holds a secret: the text may end up in logs, state and bug reports.
    """

    exit_code = 1

    def __init__(
        self, what: str, *, where: str | None = None, why: str | None = None, fix: str | None = None
    ) -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.why = why
        self.fix = fix

    def __str__(self) -> str:
        parts = [self.what]
        parts += [
            f"  {label:<5} {text}"
            for label, text in (("where", self.where), ("why", self.why), ("fix", self.fix))
            if text
        ]
        return "\n".join(parts)

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.what, self.where, self.why, self.fix)


def _rebuild(
    kind: type[PenstockError], what: str, where: str | None, why: str | None, fix: str | None
) -> PenstockError:
    error = kind.__new__(kind)
    PenstockError.__init__(error, what, where=where, why=why, fix=fix)
    return error


class UserError(PenstockError):
    """The input is wrong. Nothing was changed."""


class UsageError(UserError):
    """The command line is wrong."""

    exit_code = 2


class Unavailable(PenstockError):
    """Something outside that Penstock needs is missing, unreachable or refuses."""


class Bug(PenstockError):
    """An invariant of Penstock does not hold."""
