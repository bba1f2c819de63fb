"""JSON Schema patterns as Java regular expressions, where the two mean the same.

A pattern matches anywhere, and means what the validator's engine makes of it: `.` is anything but a
newline, `$` the very end. Java differs in both, in what `\\s` covers, and in much of what is rare.
So only a plain core is translated: literals, groups, alternatives, quantifiers, anchors, simple
classes and the ASCII escapes. For anything else, ask the validator.
"""

from __future__ import annotations

from typing import Final

_ESCAPES: Final = {
    "d": "[0-9]",
    "D": "[^0-9]",
    "w": "[A-Za-z0-9_]",
    "W": "[^A-Za-z0-9_]",
    "n": "\\n",
    "r": "\\r",
    "t": "\\t",
}
_IN_CLASS: Final = {"d": "0-9", "w": "A-Za-z0-9_", "n": "\\n", "r": "\\r", "t": "\\t"}
_PUNCTUATION: Final = frozenset("^$\\.*+?()[]{}|/-")
_QUANTIFIERS: Final = frozenset("*+?")


def to_java(pattern: str) -> str | None:
    """The same pattern for Java's `find`, or None if the two may differ."""
    made: list[str] = []
    at = 0
    atom = False  # whether a quantifier may follow
    while at < len(pattern):
        char = pattern[at]
        taken = 1
        if char == "\\":
            escaped = _escape(pattern[at + 1 : at + 2], _ESCAPES)
            if escaped is None:
                return None
            made.append(escaped)
            taken, atom = 2, True
        elif char == "[":
            end = pattern.find("]", at + 1)
            inside = None if end < 0 else _class(pattern[at + 1 : end])
            if inside is None:
                return None
            made.append(inside)
            taken, atom = end + 1 - at, True
        elif char == "(":
            group = "(?:" if pattern.startswith("(?:", at) else "("
            if pattern.startswith("(?", at) and group == "(":
                return None
            made.append("(?:")  # what a group captured is never asked for
            taken, atom = len(group), False
        elif char in _QUANTIFIERS or char == "{":
            quantifier = _quantifier(pattern, at)
            if not atom or quantifier is None:
                return None
            made.append(quantifier)
            taken, atom = len(quantifier), False
        elif char in "^$|":
            made.append({"^": "^", "$": "\\z", "|": "|"}[char])
            atom = False
        elif char == ".":
            made.append("[^\\n]")
            atom = True
        elif char in "]}":
            return None
        elif char == ")":
            made.append(")")
            atom = True
        else:
            made.append(char)
            atom = True
        at += taken
    return "".join(made) if _balanced(made) else None


def _escape(char: str, known: dict[str, str]) -> str | None:
    if char in known:
        return known[char]
    return f"\\{char}" if char and char in _PUNCTUATION else None


def _class(text: str) -> str | None:
    """A bracket expression without nesting, operators or ranges of anything but ASCII."""
    negated = text.startswith("^")
    text = text.removeprefix("^")
    made: list[str] = []
    at = 0
    while at < len(text):
        char = text[at]
        if char == "\\":
            escaped = _escape(text[at + 1 : at + 2], _IN_CLASS)
            if escaped is None:
                return None
            made.append(escaped)
            at += 2
            continue
        if char in "[&~":  # Java gives these a meaning inside brackets
            made.append(f"\\{char}")
        elif char == "-" and 0 < at < len(text) - 1:
            if not (text[at - 1].isascii() and text[at - 1].isalnum() and text[at + 1].isalnum()):
                return None
            made.append("-")
        else:
            made.append("\\-" if char == "-" else "\\^" if char == "^" else char)
        at += 1
    if not made:
        return None
    return f"[{'^' if negated else ''}{''.join(made)}]"


def _quantifier(pattern: str, at: int) -> str | None:
    if pattern[at] != "{":
        return pattern[at]
    end = pattern.find("}", at)
    low, comma, high = pattern[at + 1 : end].partition(",")
    if end < 0 or not low.isdigit() or (high and not high.isdigit()) or (high and not comma):
        return None
    if len(low) > 3 or len(high) > 3 or (high and int(low) > int(high)):
        return None
    return pattern[at : end + 1]


def _balanced(made: list[str]) -> bool:
    depth = 0
    for part in made:
        depth += (part == "(?:") - (part == ")")
        if depth < 0:
            return False
    return depth == 0
