"""Mutants that no test has to notice, each with the reason; `scripts/bench mutants` leaves them out."""

from __future__ import annotations

EXPLAINED: dict[str, dict[tuple[str, str], str]] = {}
"""Module -> (text of the line, change) -> why the change has no effect on results."""
