"""Benchmarks of Millstream beside Spark's own stateful operators: `python -m bench.throughput --help`."""
