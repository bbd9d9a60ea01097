"""First passes, on-the-fly rescoring, lattices and n-best lists."""
