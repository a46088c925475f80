"""Benchmarks of the hot paths, timed by pytest-benchmark; not part of the test suite."""
