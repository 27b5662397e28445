"""Benchmarks of Millstream beside Spark's own operators: `python -m bench.throughput --help`, and `bench.model`."""
