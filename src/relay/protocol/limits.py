"""The numbers that bound one message, one image and one connection; each stands beside the reason for it."""

from typing import Final

MAX_MESSAGE_BYTES: Final = 64 * 1024 * 1024
"""One WebSocket message, both directions of the request (vLLM-Omni: docs/serving/openpi_api.md)."""

MAX_DEPTH: Final = 16
MAX_ITEMS: Final = 65_536
MAX_CONTAINER_ITEMS: Final = 4_096
MAX_CONTAINERS: Final = 16_384
"""Nesting, values in one message, values in one map or list, maps and lists in one message. A per-container limit alone
lets 4,096² items through; a map takes ten times as long to read as a number."""

MAX_MARKERS: Final = 2_048
"""Maps that are, or may be, arrays and scalars, in one message: each takes a few microseconds of the event loop."""

MAX_STRING_BYTES: Final = 1024 * 1024
MAX_ARRAY_DIMS: Final = 8

MAX_IMAGE_SIDE: Final = 4_096
MAX_DECODED_BYTES: Final = 256 * 1024 * 1024
"""Per frame and per observation, both read from the image headers before a pixel is decoded."""

MAX_FRAMES: Final = 256
"""Encoded frames of one camera in one observation: reading their headers takes up to 70 microseconds each."""

MAX_PROMPT_BYTES: Final = 4_096

MAX_SESSIONS_PER_CONNECTION: Final = 1_024
MAX_SESSION_ID_CHARS: Final = 256
MAX_OUTSTANDING_REQUESTS: Final = 4
"""Requests one connection may have in flight before the server stops reading from it."""

PING_INTERVAL_S: Final = 20.0
PING_TIMEOUT_S: Final = 60.0
CLOSE_TIMEOUT_S: Final = 2.0

SUBPROTOCOL: Final = "relay.v1"
"""Offered by our clients; a server that selects it takes encoded images and answers pings at all times."""
