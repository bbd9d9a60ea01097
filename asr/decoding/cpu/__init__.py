"""The search by numba loops on a CPU."""
