"""Benchmarks: each prints what we reach beside what the machine can do at all, and beside peers. See ``bench.cli``."""
