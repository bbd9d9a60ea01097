"""Benchmarks, run by `scripts/bench NAME`: each NAME is a module with a `main`; the others are what they share."""
