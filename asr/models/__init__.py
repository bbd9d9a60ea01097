"""Acoustic models, their objectives and their training."""
