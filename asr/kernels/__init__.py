"""Compiled building blocks: loops, products, hash tables, threads."""
