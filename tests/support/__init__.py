"""Helpers of the tests: strategies, oracles, simulated tasks and stores that fail on purpose."""
