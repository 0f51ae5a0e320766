"""The server's side of TLS: a context from a certificate and its key, or a sentence about what is wrong with them."""

from __future__ import annotations

import ssl
from pathlib import Path


def tls_context(cert: Path | None, key: Path | None) -> ssl.SSLContext | None:
    """A context for TLS 1.2 and newer; None if neither file is given.

    Args:
        cert: PEM file of the server's certificate, followed by those that lead to its root.
        key: PEM file of its private key, without a password.

    Raises:
        ValueError: one without the other, a file that cannot be read, or files that are not a certificate and its key.
    """
    if cert is None and key is None:
        return None
    if cert is None or key is None:
        missing = "--tls-cert" if cert is None else "--tls-key"
        raise ValueError(f"TLS takes a certificate and its key: {missing} is missing")
    for option, file in (("--tls-cert", cert), ("--tls-key", key)):
        try:
            file.open("rb").close()
        except OSError as error:
            raise ValueError(f"{option} {str(file)!r} cannot be read: {error.strerror or error}") from error
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(cert, key, password=_no_password)
    except _Protected:
        raise ValueError(f"--tls-key {str(key)!r} is protected by a password; write it without one") from None
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ValueError(f"--tls-key {str(key)!r} is not the key of --tls-cert {str(cert)!r}") from error
        raise ValueError(
            f"--tls-cert {str(cert)!r} and --tls-key {str(key)!r} are not a PEM certificate and its key: "
            f"{error.reason or error}"
        ) from error
    return context


class _Protected(Exception):
    """Asked for the key's password, which would otherwise be read from the terminal."""


def _no_password() -> str:
    raise _Protected
