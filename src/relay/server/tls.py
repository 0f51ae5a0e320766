"""The server's side of TLS: a context from a certificate and its key, or a sentence about what is wrong with them."""

from __future__ import annotations

import hashlib
import re
import ssl
from pathlib import Path


def tls_context(
    cert: Path | None, key: Path | None, options: tuple[str, str] = ("--tls-cert", "--tls-key")
) -> ssl.SSLContext | None:
    """A context for TLS 1.2 and newer; None if neither file is given.

    Args:
        cert: PEM file of the server's certificate, followed by those that lead to its root.
        key: PEM file of its private key, without a password.
        options: what the two are called in errors.

    Raises:
        ValueError: one without the other, a file that cannot be read, or files that are not a certificate and its key.
    """
    if cert is None and key is None:
        return None
    if cert is None or key is None:
        missing = options[0] if cert is None else options[1]
        raise ValueError(f"TLS takes a certificate and its key: {missing} is missing")
    named_cert, named_key = f"{options[0]} {str(cert)!r}", f"{options[1]} {str(key)!r}"
    for named, file in ((named_cert, cert), (named_key, key)):
        try:
            file.open("rb").close()
        except OSError as error:
            raise ValueError(f"{named} cannot be read: {error.strerror or error}") from error
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(cert, key, password=_no_password)
    except _Protected:
        raise ValueError(f"{named_key} is protected by a password; write it without one") from None
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ValueError(f"{named_key} is not the key of {named_cert}") from error
        raise ValueError(
            f"{named_cert} and {named_key} are not a PEM certificate and its key: {error.reason or error}"
        ) from error
    return context


def certificate_sha256(cert: Path) -> str:
    """The SHA-256 digest, in hexadecimal, of the certificate that a server with this PEM file shows: its first.

    Raises:
        ValueError: the file holds no certificate.
        OSError: it cannot be read.
    """
    first = re.search(r"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", cert.read_text("latin-1"), re.DOTALL)
    if first is None:
        raise ValueError(f"{str(cert)!r} holds no certificate in PEM form")
    return hashlib.sha256(ssl.PEM_cert_to_DER_cert(first[0])).hexdigest()


class _Protected(Exception):
    """Asked for the key's password, which would otherwise be read from the terminal."""


def _no_password() -> str:
    raise _Protected
