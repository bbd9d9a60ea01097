"""The search with Triton kernels on a GPU."""
