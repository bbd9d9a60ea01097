"""What figures are drawn with; matplotlib is needed only here."""

from __future__ import annotations

from typing import Any

from asr.errors import AsrError


def pyplot() -> Any:
    """matplotlib's pyplot for files, no screen.

    Raises:
        AsrError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise AsrError("figures need matplotlib; run `pip install 'asr[plots]'`.") from error
    matplotlib.use("svg")
    # Text as text, and the same names of things in each run: smaller SVG files that differ where figures do.
    matplotlib.rcParams["svg.fonttype"] = "none"
    matplotlib.rcParams["svg.hashsalt"] = "figure"
    import matplotlib.pyplot

    return matplotlib.pyplot
