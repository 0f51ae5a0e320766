"""The direct route past a proxy: what server and client call its parts, and what its address may look like.

Knows text only: which machine an address leads to is the client's to judge.
"""

from __future__ import annotations

import urllib.parse
from typing import Final

from relay.protocol.wording import quoted, shown

TICKET_HEADER: Final = "X-Relay-Ticket"
"""In which a client shows its ticket; never in the URL, which proxies and servers write into logs."""

URL_KEY: Final = "direct_url"
TICKET_KEY: Final = "direct_ticket"
CERT_KEY: Final = "direct_cert_sha256"
INSTANCE_KEY: Final = "instance_id"
"""The keys of the metadata map on vLLM-Omni's path."""

INSTANCE_HEADER: Final = "Relay-Instance"
RESPONSE_HEADERS: Final = {
    URL_KEY: "Relay-Direct-Url",
    TICKET_KEY: "Relay-Direct-Ticket",
    CERT_KEY: "Relay-Direct-Cert-Sha256",
    INSTANCE_KEY: INSTANCE_HEADER,
}
"""And on OpenPI's path, whose metadata have no place for them, the headers of the upgrade's response."""

MAX_URL_CHARS: Final = 2_048

_EXPECTED: Final = "expected ws://host[:port][/path] or wss://host[:port][/path]"


def read_direct_url(url: object) -> urllib.parse.SplitResult:
    """The parts of a direct route's address.

    Raises:
        ValueError: it is none, or holds a user, port 0, a fragment, or characters that no URL holds.
    """
    if not isinstance(url, str):
        raise ValueError(f"direct_url is {shown(url)}, {_EXPECTED}")
    if len(url) > MAX_URL_CHARS:
        raise ValueError(f"direct_url has {len(url):,} characters; at most {MAX_URL_CHARS:,} are taken")
    if not all("!" <= character <= "~" for character in url):
        raise ValueError(f"direct_url is {quoted(url)}; a URL is printable ASCII without spaces")
    try:
        parts = urllib.parse.urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ValueError(f"direct_url cannot be read: {error}") from None
    if "@" in parts.netloc:
        raise ValueError("direct_url holds a user or a password, which would travel with every connection")
    if parts.scheme not in ("ws", "wss") or not host or "#" in url or "\\" in url:
        raise ValueError(f"direct_url is {quoted(url)}, {_EXPECTED}")
    if port == 0:
        raise ValueError(f"direct_url is {quoted(url)}: nothing listens on port 0")
    return parts


def is_sha256(text: object) -> bool:
    """Whether this is a SHA-256 digest in 64 hexadecimal digits."""
    return isinstance(text, str) and len(text) == 64 and all(c in "0123456789abcdef" for c in text.lower())
