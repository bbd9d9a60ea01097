"""Reference implementations: slow, plain, and right. Tests and benchmarks compare the real ones with them."""
