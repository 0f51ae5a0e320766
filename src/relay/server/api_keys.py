"""The keys that open a server: where they are read, and how a client's is compared. Keeps SHA-256 digests only."""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import re
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

ENVIRONMENT = "RELAY_API_KEYS"
"""Environment variable with keys, separated by commas or line breaks."""

MIN_KEY_CHARACTERS = 16

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class ApiKeys:
    """The digests of all keys of one server; without any, every client is let in.

    One object for all who ask, so that keys that are replaced are replaced for all of them at once.
    """

    digests: frozenset[bytes] = field(default=frozenset(), repr=False)
    _ever: frozenset[bytes] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._ever = self.digests

    def replace(self, newer: ApiKeys) -> None:
        """Let in with these keys from now on."""
        self.digests = newer.digests
        self._ever |= newer.digests

    @property
    def several(self) -> bool:
        """Whether clients with different keys may be connected: those with one that was taken out may still be."""
        return len(self._ever) > 1

    def __len__(self) -> int:
        return len(self.digests)

    def holds(self, key: str) -> bool:
        """Whether this is one of the keys."""
        return self.tenant(key) is not None

    def tenant(self, key: str) -> str | None:
        """A name for whoever has this key, or None if it is none; takes as long for the first of them as for none."""
        given = _digest(key)
        found = False
        for digest in self.digests:
            found |= hmac.compare_digest(digest, given)
        return given.hex() if found else None

    def still_hold(self, tenant: str) -> bool:
        """Whether a tenant's key is one of them still; always, where none is asked for."""
        return not self.digests or bytes.fromhex(tenant) in self.digests


def read_api_keys(file: Path | None = None, environment: Mapping[str, str] = os.environ) -> ApiKeys:
    """The keys of a file and of `RELAY_API_KEYS` together.

    Args:
        file: one key a line; blank lines and lines that begin with `#` do not count.

    Raises:
        ValueError: naming the place but never the key: a file that cannot be read, a source without a key, a key of
            fewer than 16 characters, or of other characters than printable ASCII without spaces and commas.
    """
    keys: list[str] = []
    if file is not None:
        keys += _keys_of_file(file)
    if ENVIRONMENT in environment:
        parts = (part.strip() for part in re.split(r"[,\n]", environment[ENVIRONMENT]))
        keys += _checked(((f"{ENVIRONMENT}, key {n}", key) for n, key in enumerate(parts, 1)), ENVIRONMENT)
    return ApiKeys(frozenset(map(_digest, keys)))


def _keys_of_file(file: Path) -> list[str]:
    try:
        with file.open("rb") as opened:
            mode = os.fstat(opened.fileno()).st_mode
            lines = opened.read().decode("utf-8", "replace").splitlines()
    except OSError as error:
        raise ValueError(f"the API keys in {str(file)!r} cannot be read: {error.strerror or error}") from error
    if os.name == "posix" and stat.S_ISREG(mode) and mode & (stat.S_IRGRP | stat.S_IROTH):
        logger.warning("%s can be read by other users (mode %03o); chmod 600 it", file, stat.S_IMODE(mode))
    stripped = ((f"{str(file)!r}, line {n}", line.strip()) for n, line in enumerate(lines, 1))
    return _checked(((where, key) for where, key in stripped if not key.startswith("#")), repr(str(file)))


def _checked(keys: Iterable[tuple[str, str]], source: str) -> list[str]:
    """The keys, each paired with where it stands; empty ones do not count."""
    checked: list[str] = []
    for where, key in keys:
        if not key:
            continue
        if not re.fullmatch(r"[!-+\--~]+", key):
            raise ValueError(f"{where}: an API key is printable ASCII without spaces and commas")
        if len(key) < MIN_KEY_CHARACTERS:
            raise ValueError(
                f"{where}: the API key has {len(key)} characters; at least {MIN_KEY_CHARACTERS} are needed"
            )
        checked.append(key)
    if not checked:
        raise ValueError(f"{source} holds no API key; name at least one, or leave it out")
    return checked


def _digest(key: str) -> bytes:
    # What a client sends for a key may be any bytes, and some releases of `websockets` decode them to surrogates.
    return hashlib.sha256(key.encode(errors="surrogatepass")).digest()
