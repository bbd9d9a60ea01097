"""Recurrent language models: layers, output layers, training."""
