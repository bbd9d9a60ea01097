"""Code that tests and benchmarks share: slow but obviously correct reference implementations, and a small bundle."""
