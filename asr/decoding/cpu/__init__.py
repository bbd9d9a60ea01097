"""The search with numba loops on a CPU."""
