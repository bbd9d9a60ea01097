"""n-gram models: files, estimation, pruning, look-up."""
