"""Materializations: the task as its leader knows it, its state machines, and the shell they run."""
