"""Error rates, timing, cache statistics and reports."""
