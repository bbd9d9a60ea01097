"""Benchmarks, run by `scripts/bench NAME`. Each NAME is a module with a `main`; the other modules are shared code."""
