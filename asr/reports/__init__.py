"""Reports of evaluations: what `asr evaluate` found, and the page that `asr report` makes of it."""
