"""Measures what the library promises, against its rivals, in one run on one machine: ``python -m benchmarks.run``."""
