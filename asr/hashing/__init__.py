"""A hash table in tensors, on any device."""
