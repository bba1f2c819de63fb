"""Benchmarks: each workload measures Penstock and its peers in the same run."""
