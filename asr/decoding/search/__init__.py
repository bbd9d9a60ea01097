"""Token passing in tensors: the search of the torch pass and of rescoring."""
