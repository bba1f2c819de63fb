"""PURE: the text of a Spark query with the place of each part, and text that is put into it.

A query is parsed to judge it, but never written anew from the parsed form: whatever must be added
is **inserted** between characters that stay as they are. So this keeps what sqlglot forgets: where
a select list ends, and where a clause begins.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from sqlglot import exp
from sqlglot.dialects.spark import Spark
from sqlglot.errors import ErrorLevel, ParseError, TokenError
from sqlglot.parsers.spark import SparkParser
from sqlglot.tokenizer_core import Token, TokenType

from penstock.runtime.derive.spark_functions import words

_E = TypeVar("_E", bound=exp.Expr)

_LIST_END: Final = "select_list_end"
_STOP: Final = "stop"

_DEPTH: Final = {
    TokenType.L_PAREN: 1,
    TokenType.L_BRACKET: 1,
    TokenType.R_PAREN: -1,
    TokenType.R_BRACKET: -1,
}


_BEGINS: Final = {
    TokenType.WITH,
    TokenType.SELECT,
    TokenType.FROM,
    TokenType.VALUES,
    TokenType.TABLE,
    TokenType.L_PAREN,
}
"""Tokens that a query may begin with."""

_STATEMENTS: Final = words(
    """
    ADD ALTER ANALYZE BEGIN CACHE CALL CLEAR COMMENT COMMIT COPY CREATE DECLARE DELETE DESC
    DESCRIBE DFS DROP EXECUTE EXPLAIN EXPORT GRANT IMPORT INSERT LIST LOAD LOCK MERGE MSCK
    OPTIMIZE REFRESH REPAIR REPLACE RESET REVOKE ROLLBACK SET SHOW START TRUNCATE UNCACHE UNLOCK
    UPDATE USE VACUUM
    """
)
"""First words of statements that are no queries."""

_ENDS_LIST: Final = {
    TokenType.COMMA,
    TokenType.FROM,
    TokenType.R_PAREN,
    TokenType.R_BRACKET,
    TokenType.SEMICOLON,
}


class _Parser(SparkParser):
    """Notes where select lists end, and up to which token each part reaches."""

    def expression(
        self, instance: _E, token: Token | None = None, comments: list[str] | None = None
    ) -> _E:
        made = super().expression(instance, token, comments)
        if self._prev is not None:
            made.meta[_STOP] = self._prev.end
        return made

    def _parse_projections(self) -> tuple[list[exp.Expr], list[exp.Expr] | None]:
        found = super()._parse_projections()
        if found[0]:
            found[0][0].meta[_LIST_END] = self._prev.end + 1
        return found


@dataclass(frozen=True, slots=True)
class SyntaxMistake(Exception):
    """The text does not parse."""

    offset: int
    message: str
    hint: str | None = None


@dataclass(frozen=True, slots=True)
class Insertion:
    """Text that goes between the characters before and after an offset."""

    offset: int
    text: str


@dataclass(frozen=True, slots=True)
class QueryText:
    """A text, its tokens, and the statements in it."""

    text: str
    tokens: Sequence[Token]
    statements: Sequence[exp.Expr]

    @classmethod
    def parse(cls, text: str) -> QueryText:
        """Parse a text; raises SyntaxMistake."""
        dialect = Spark()
        try:
            tokens = dialect.tokenize(text)
        except TokenError:
            raise SyntaxMistake(
                max(len(text) - 1, 0), "a text or a comment is not closed"
            ) from None
        _check_tokens(tokens)
        parser = _Parser(dialect=dialect, error_level=ErrorLevel.IMMEDIATE)
        try:
            parsed = parser.parse(tokens, text)
        except ParseError as e:
            raise _syntax_mistake(e, text, tokens) from None
        except RecursionError:
            raise SyntaxMistake(0, "the query is nested too deeply") from None
        return cls(text, tokens, [statement for statement in parsed if statement is not None])

    @property
    def closed(self) -> str:
        """The text without the semicolons at its end, in which every other offset stays."""
        marks = {token.start for token in self.tokens if token.token_type is TokenType.SEMICOLON}
        return "".join(" " if at in marks else c for at, c in enumerate(self.text))

    def tables(self) -> list[str]:
        """The names of all tables that are read, those of WITH queries included."""
        return [t.name for statement in self.statements for t in statement.find_all(exp.Table)]

    def second_statement(self) -> int:
        """Return where the second of several statements begins."""
        ended = [t.start for t in self.tokens if t.token_type is TokenType.SEMICOLON]
        return next(int(t.start) for t in self.tokens if ended and t.start > ended[0])

    def line(self, offset: int) -> int:
        """The line of an offset, from one."""
        return self.text.count("\n", 0, offset) + 1

    def written(self, node: exp.Expr) -> str:
        """The name of a function as it is written; empty if its place is not known."""
        start, end = node.meta.get("start"), node.meta.get("end")
        return self.text[start : end + 1] if start is not None and end is not None else ""

    def start(self, node: exp.Expr) -> int:
        """Return where a part begins: at its first name, function or star whose place is known."""
        starts = [n.meta["start"] for n in node.walk() if "start" in n.meta]
        if starts:
            return int(min(starts))
        stop = node.meta.get(_STOP)
        return next((int(t.start) for t in self.tokens if t.end == stop), 0)

    def keyword(self, node: exp.Expr, *kinds: TokenType, words: Iterable[str] = ()) -> int:
        """Return where the keyword of a clause is: the last one before its end at its own depth."""
        stop = node.meta.get(_STOP)
        if stop is None:
            return self.start(node)
        wanted = {word.upper() for word in words}
        depth = 0
        for token in reversed([t for t in self.tokens if t.end <= stop]):
            depth -= _DEPTH.get(token.token_type, 0)
            if depth <= 0 and (token.token_type in kinds or token.text.upper() in wanted):
                return int(token.start)
        return self.start(node)

    def list_end(self, select: exp.Select) -> int | None:
        """Return the offset behind the select list; None if the query has none (`TABLE name`)."""
        listed = select.expressions
        found: int | None = listed[0].meta.get(_LIST_END) if listed else None
        return found

    def after(self, node: exp.Expr) -> int:
        """Return the offset behind a name or a star."""
        return int(node.meta["end"]) + 1

    def closing(self, offset: int) -> int:
        """Return the offset of the parenthesis that closes the first one from `offset` on."""
        depth = 0
        for token in self.tokens:
            if token.start < offset:
                continue
            depth += _DEPTH.get(token.token_type, 0)
            if token.token_type is TokenType.R_PAREN and depth == 0:
                return int(token.start)
        return len(self.text)

    def is_called(self, offset: int, word: str) -> bool:
        """True if the token that begins at an offset is the given word."""
        found = next((t for t in self.tokens if t.start >= offset), None)
        return found is not None and found.text.upper() == word


def insert(text: str, insertions: Iterable[Insertion]) -> str:
    """Return the text with the insertions in it; those at one offset in the order given."""
    parts: list[str] = []
    done = 0
    for each in sorted(insertions, key=lambda i: i.offset):
        parts += [text[done : each.offset], each.text]
        done = each.offset
    return "".join([*parts, text[done:]])


def _check_tokens(tokens: Sequence[Token]) -> None:
    """Refuse what sqlglot would only warn about, or take in silence."""
    if not tokens:
        raise SyntaxMistake(0, "there is no query")
    if tokens[0].token_type not in _BEGINS and tokens[0].text.upper() not in _STATEMENTS:
        raise SyntaxMistake(int(tokens[0].start), f'near "{tokens[0].text}": syntax error')
    if tokens[0].token_type not in _BEGINS:
        word = tokens[0].text.upper()
        hint = "a lambda is one query, such as select … from source"
        raise SyntaxMistake(int(tokens[0].start), f"{word} is not a query", hint)
    for token, following in zip(tokens, [*tokens[1:], None], strict=True):
        if token.token_type is TokenType.COMMA and (
            following is None or following.token_type in _ENDS_LIST
        ):
            raise SyntaxMistake(int(token.start), 'near ",": nothing follows it')
        if token.token_type is TokenType.PIPE_GT:
            raise SyntaxMistake(int(token.start), "the pipe syntax is not supported")


def _syntax_mistake(error: ParseError, text: str, tokens: Sequence[Token]) -> SyntaxMistake:
    found = error.errors[0] if error.errors else {}
    line, column = found.get("line"), found.get("col")
    at = next((t for t in tokens if t.line == line and t.col == column), None)
    if at is None:
        at = tokens[-1] if tokens else None
    offset = int(at.start) if at is not None else 0
    near = text[offset : int(at.end) + 1] if at is not None else ""
    description = str(found.get("description") or "").split("\n")[0].rstrip(".")
    if not description or "<class" in description or "Unexpected token" in description:
        description = "syntax error"
    keyword = at is not None and near.isidentifier() and at.token_type is not TokenType.VAR
    quote = "a name that is a keyword needs backquotes" if keyword else None
    return SyntaxMistake(offset, f'near "{near}": {description}' if near else description, quote)
