"""A PyTorch-native speech recognizer that decodes with a large language model inside the search."""

__version__ = "0.1.0"
