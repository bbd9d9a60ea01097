"""Acoustic models: networks, training objectives and the Lightning module."""
