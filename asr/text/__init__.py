"""Words, pronunciations, tokens and text normalization."""
