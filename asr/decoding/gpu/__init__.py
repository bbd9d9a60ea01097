"""The search by Triton kernels on a GPU."""
