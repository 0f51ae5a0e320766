"""TLS to a server that is known by the digest of its certificate alone, such as one with an address but no name."""

from __future__ import annotations

import hashlib
import hmac
import ssl

from relay.client.tls_socket import TurnTakingSocket


class OtherCertificate(ssl.SSLError):
    """The server showed a certificate that is not the one expected."""


def trusting_only(sha256: str) -> ssl.SSLContext:
    """A context that accepts the one certificate with this digest, whoever signed it and whatever name it has.

    The digest is compared at the end of the TLS handshake, before anything is sent.

    Args:
        sha256: of the certificate in DER form, in hexadecimal digits.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE

    def check(certificate: bytes | None) -> None:
        found = hashlib.sha256(certificate or b"").hexdigest()
        if not hmac.compare_digest(found, sha256.lower()):
            text = f"the certificate's SHA-256 is {found}, not the one announced"
            raise OtherCertificate(ssl.SSL_ERROR_SSL, text)  # asyncio passes no other kind of error on

    class PinningSocket(TurnTakingSocket):  # for the blocking clients
        def do_handshake(self, block: bool = False) -> None:
            super().do_handshake(block)
            check(self.getpeercert(binary_form=True))

    class PinningObject(ssl.SSLObject):  # for asyncio's
        def do_handshake(self) -> None:
            super().do_handshake()
            check(self.getpeercert(binary_form=True))

    context.sslsocket_class = PinningSocket
    context.sslobject_class = PinningObject
    return context
