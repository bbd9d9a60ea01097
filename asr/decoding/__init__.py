"""Decoders: token passing and k2, on-the-fly rescoring, lattices, n-best lists."""
