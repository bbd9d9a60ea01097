"""Shallow fusion: language models of words inside the search of networks that write token after token."""
