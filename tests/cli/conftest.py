"""The command line's tests use the checkpoint folders of all families."""

from __future__ import annotations

import sys
from pathlib import Path

for family in ("pi0", "groot"):
    sys.path.insert(0, str(Path(__file__).parents[1] / "models" / family))
