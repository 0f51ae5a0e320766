"""What a robot's computer has to hold for the client."""

from __future__ import annotations

import subprocess
import sys


def test_lesson_4_10_the_client_loads_nothing_heavy() -> None:
    """Physical-Intelligence/openpi#991; releases and interpreters are `make test-all`'s."""
    script = (
        "import sys, relay\n"
        "relay.Policy, relay.PolicyClient, relay.AsyncPolicy\n"
        "heavy = {'torch', 'jax', 'cv2', 'tyro', 'rich', 'yaml', 'matplotlib'} & sys.modules.keys()\n"
        "sys.exit(' '.join(sorted(heavy)) or None)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
