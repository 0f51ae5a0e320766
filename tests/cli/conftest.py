"""The command line's tests use the checkpoint folders of π0's."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "models" / "pi0"))
