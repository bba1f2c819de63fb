"""Gives numbers and their squares, some at a time."""

from penstock.capture import State


def read(config, state):
    first = state.get("next", 1)
    for n in range(first, config["until"] + 1):
        yield "numbers", {"n": n, "square": n * n}
        yield State({"next": n + 1})
