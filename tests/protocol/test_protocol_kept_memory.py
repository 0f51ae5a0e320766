"""Large messages use the same memory again and again."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

PAGE_FAULTS = """
import resource, sys
from relay.protocol.kept_memory import keep_freed_memory
if sys.argv[1] == "kept":
    keep_freed_memory()
def message():
    return bytearray(b"x" * 3_000_000) + b"y"
for _ in range(5):
    message()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    message()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other allocators keep what they like")
def test_copies_of_a_large_message_touch_no_new_pages():
    def page_faults(how: str) -> int:
        return int(subprocess.run([sys.executable, "-c", PAGE_FAULTS, how], check=True, capture_output=True).stdout)

    assert page_faults("kept") < 100 < page_faults("as it is")
