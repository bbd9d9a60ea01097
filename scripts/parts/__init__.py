"""What benchmarks and checks are made of: workloads, tables, peers. The commands are one folder up."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# The checkout's own package, whatever is installed.
sys.path.insert(0, str(ROOT))
