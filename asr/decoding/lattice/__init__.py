"""Lattices: made, scored, searched, in files."""
