"""The search's frame compiled by numba."""
