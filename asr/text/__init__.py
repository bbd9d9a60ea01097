"""Words, pronunciations, tokens and text normalisation."""
