"""Benchmarks: `python benchmarks/bench.py --help`."""
