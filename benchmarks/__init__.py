"""Benchmarks of the library against its baselines, in one run on one machine: ``python -m benchmarks.run``."""
