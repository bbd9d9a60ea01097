"""The torch pass's frame by Triton kernels: no value goes to the host unless its owner asks for it."""
