"""Derivations: collections that are computed from others, transaction by transaction."""
