"""Tables as the pages here have them."""

from __future__ import annotations

from typing import Any


def table(title: str, rows: list[dict[str, Any]], thousands: str = "") -> None:
    """Prints rows of equal keys as a Markdown table; `thousands` stands between each three digits of whole numbers."""
    print(f"\n### {title}\n\n| {' | '.join(rows[0])} |\n|{' --- |' * len(rows[0])}")
    for row in rows:
        print(f"| {' | '.join(_cell(value, thousands) for value in row.values())} |", flush=True)


def _cell(value: Any, thousands: str) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:{thousands}}" if isinstance(value, int) else str(value)
