"""What a server asks its clients for and what it shows them: API keys and certificates, from files that may change.

Reads them at the start and again on SIGHUP. Knows no connection: who is in stays in.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from relay.server.api_keys import ApiKeys, read_api_keys
from relay.server.tls import certificate_sha256, tls_context

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Credentials:
    """As `ServerSettings` has them, under the same names."""

    api_keys: ApiKeys = field(repr=False)
    tls: ssl.SSLContext | None = field(default=None, repr=False)
    direct_tls: ssl.SSLContext | None = field(default=None, repr=False)
    direct_cert_sha256: str | None = None


@dataclass(frozen=True, slots=True)
class CredentialFiles:
    """Where they are read; named as the options of `relay serve`.

    Attributes:
        direct_fingerprint: whether clients are told the digest of the direct route's certificate.
    """

    api_keys_file: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    direct_tls_cert: Path | None = None
    direct_tls_key: Path | None = None
    direct_fingerprint: bool = False

    def read(self) -> Credentials:
        """All of them, as the files are now.

        Raises:
            ValueError: files that do not belong together, or do not hold what they should.
            OSError: the certificate to be announced cannot be read.
        """
        direct_cert = self.direct_tls_cert or self.tls_cert
        if self.direct_fingerprint and direct_cert is None:
            raise ValueError("--direct-fingerprint needs the certificate: give --direct-tls-cert or --tls-cert")
        return Credentials(
            read_api_keys(self.api_keys_file),
            tls_context(self.tls_cert, self.tls_key),
            tls_context(self.direct_tls_cert, self.direct_tls_key, ("--direct-tls-cert", "--direct-tls-key")),
            certificate_sha256(direct_cert) if direct_cert and self.direct_fingerprint else None,
        )


async def read_again(reread: Callable[[], Credentials], *, keys: bool, tls: bool) -> Credentials | None:
    """New credentials, all of them; None, and a line in the log, where any cannot be used.

    Args:
        keys, tls: whether the server asks for keys and speaks TLS, neither of which changes while it runs.
    """
    try:
        fresh = await asyncio.to_thread(reread)
        if (bool(fresh.api_keys), fresh.tls is not None) != (keys, tls):
            raise ValueError("API keys and TLS cannot come or go while the server runs")
    except Exception as error:
        unforeseen = None if isinstance(error, (ValueError, OSError)) else error
        logger.error("API keys and certificates stay as they were: %s", error, exc_info=unforeseen)
        return None
    logger.info("API keys and certificates were read again; open connections stay open")
    return fresh
