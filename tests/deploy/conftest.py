"""The deployment's tests use servers, clients and engines of the integration's."""

from __future__ import annotations

import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS / "integration"), str(TESTS.parent / "scripts")]
