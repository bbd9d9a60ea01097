"""What tests and benchmarks share: reference implementations that are slow, plain and right, and a small bundle."""
