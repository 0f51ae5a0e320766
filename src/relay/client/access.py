"""How a client gets through to its server: with which headers, trusting which certificates, past which proxy.

Reads what the caller said, and words what went wrong; opens no connection.
"""

from __future__ import annotations

import ssl
import urllib.parse
from base64 import b64encode
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from os import PathLike, fspath
from typing import Final, NoReturn

from websockets.exceptions import InvalidURI
from websockets.uri import WebSocketURI, parse_uri

from relay.client.pinned_tls import OtherCertificate

LONGEST_PROXY_ANSWER: Final = 16 * 1024

_WRONG_NAME: Final = frozenset({62, 64})  # X509_V_ERR_HOSTNAME_MISMATCH, X509_V_ERR_IP_ADDRESS_MISMATCH
_WRONG_TIME: Final = frozenset({9, 10})  # X509_V_ERR_CERT_NOT_YET_VALID, X509_V_ERR_CERT_HAS_EXPIRED
_SERVER_MAY_BE_STARTING: Final = frozenset({502, 503, 504})


class ProxyError(OSError):
    """The proxy that the caller asked for cannot be used; waiting for the server does not help."""


class ProxyTimeoutError(ProxyError, TimeoutError):
    """The proxy that the caller asked for did not answer in time."""


@dataclass(frozen=True, slots=True)
class Proxy:
    """An HTTP proxy, which is asked for a tunnel (RFC 9110, section 9.3.6).

    Attributes:
        url: its address without user and password.
        credentials: the value of `Proxy-Authorization`.
    """

    url: str
    host: str
    port: int
    credentials: str | None = field(repr=False)

    def request(self, host: str, port: int) -> bytes:
        """What asks for a tunnel to the server."""
        server = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        credentials = f"Proxy-Authorization: {self.credentials}\r\n" if self.credentials else ""
        return f"CONNECT {server} HTTP/1.1\r\nHost: {server}\r\n{credentials}\r\n".encode()

    def awaits_more(self, answer: bytes) -> bool:
        """Whether the answer goes on; to be read byte by byte, since what follows it belongs to the tunnel.

        Raises:
            ProxyError: this is no proxy's answer.
        """
        if len(answer) > LONGEST_PROXY_ANSWER or not b"HTTP/".startswith(answer[:5]):
            raise ProxyError(f"{self.url} does not answer as an HTTP proxy does")
        return not answer.endswith(b"\r\n\r\n")

    def hung_up(self) -> NoReturn:
        """Say that the connection ended before the answer did."""
        raise ProxyError(f"the proxy {self.url} hung up")

    def check(self, answer: bytes) -> None:
        """Accept the answer that opens the tunnel.

        Raises:
            ProxyError: the proxy refuses.
            OSError: it cannot reach the server, which may be starting.
        """
        status_line = answer.partition(b"\r\n")[0].decode("latin-1")
        code = int(text) if (text := status_line[9:12]).isdecimal() else 0
        if 200 <= code < 300:
            return
        said = f"the proxy {self.url} answered {status_line[:100]!a}"
        if code in _SERVER_MAY_BE_STARTING:
            raise OSError(said)
        hint = "; give its user and password as in http://user:password@proxy.example:3128" if code == 407 else ""
        raise ProxyError(f"{said}{hint}")

    @contextmanager
    def named_in_errors(self) -> Generator[None]:
        """Tell failures to reach the proxy from failures to reach the server."""
        try:
            yield
        except TimeoutError:
            raise ProxyTimeoutError(f"the proxy {self.url} did not answer in time") from None
        except OSError as error:
            if isinstance(error, ProxyError):
                raise
            raise ProxyError(error.errno, f"the proxy {self.url} cannot be reached: {error.strerror}") from error


@dataclass(frozen=True, slots=True)
class Access:
    """What the caller said about the way to the server, beside its address.

    Attributes:
        tls: trusts the caller's certificates; None trusts the system's.
        proxy: None connects directly, whatever the environment says.
        direct: take the direct route past proxies that a server may offer once it is connected to.
    """

    tls: ssl.SSLContext | None = None
    proxy: Proxy | None = None
    direct: bool = False

    def name(self, url: str) -> str:
        """The server's address for a message, with the proxy on the way to it."""
        return shown(url) + (f" (through the proxy {self.proxy.url})" if self.proxy else "")


DIRECT: Final = Access()


def read_access(url: str, ca_file: str | PathLike[str] | None, proxy: str | None, direct: bool = False) -> Access:
    """Check what the caller said, before any connection.

    Raises:
        ValueError: `ca_file` holds no certificates, or the connection is not encrypted; `proxy` is no HTTP proxy.
        OSError: naming `ca_file`, if it cannot be read.
        websockets.exceptions.InvalidURI: `url` is no WebSocket URL.
    """
    return Access(
        None if ca_file is None else _trusting(fspath(ca_file), url),
        None if proxy is None else read_proxy(proxy),
        direct,
    )


def check_headers(headers: Mapping[str, str]) -> None:
    """Raise `ValueError` for a header that would not arrive as it is, such as a key read with its line's end."""
    for name, value in headers.items():
        if any(character in f"{name}{value}" for character in "\r\n\0"):
            raise ValueError(f"the header {name!r} holds a line break, which would end it; strip() what was read")


def read_proxy(url: str) -> Proxy:
    """The proxy at an address such as `http://user:password@proxy.example:3128`.

    Raises:
        ValueError: it is no address, or the proxy is of another kind.
    """
    try:
        parts = urllib.parse.urlsplit(url)
        host, port = parts.hostname, parts.port or 80
    except ValueError:
        host, port, parts = None, 0, urllib.parse.urlsplit("")
    if parts.scheme != "http" or not host or parts.path not in ("", "/") or parts.query or parts.fragment:
        raise ValueError(f"proxy must be an HTTP proxy such as 'http://proxy.example:3128', got {shown(url)!r}")
    credentials = None
    if parts.username is not None:
        pair = f"{urllib.parse.unquote(parts.username)}:{urllib.parse.unquote(parts.password or '')}"
        credentials = "Basic " + b64encode(pair.encode()).decode()
    return Proxy(shown(url).rstrip("/"), host, port, credentials)


def explained(url: str, error: ssl.SSLError) -> ssl.SSLError:
    """The same failure of TLS, naming the server and what to do."""
    if isinstance(error, OtherCertificate):
        return error
    if isinstance(error, ssl.SSLCertVerificationError):
        if error.verify_code in _WRONG_NAME:
            remedy = "connect by a name that stands in it"
        elif error.verify_code in _WRONG_TIME:
            remedy = "renew it, or set this machine's clock"
        else:
            remedy = "pass the certificate of the authority that signed it as ca_file=, or name it in SSL_CERT_FILE"
        text = f"the certificate of {shown(url)} cannot be verified: {error.verify_message.rstrip('.')}; {remedy}"
        return ssl.SSLCertVerificationError(error.errno, text)
    if isinstance(error, (ssl.SSLEOFError, ssl.SSLZeroReturnError)):
        return type(error)(error.errno, f"{shown(url)} hung up during the TLS handshake; without TLS: ws://")
    reason = error.reason or error.strerror or error
    return ssl.SSLError(
        error.errno, f"{shown(url)} does not answer as a TLS server does ({reason}); without TLS: ws://"
    )


def shown(url: str) -> str:
    """The URL without what may be secret: user info, query and fragment."""
    try:
        parts = urllib.parse.urlsplit(url)
    except ValueError:
        return "..."
    return urllib.parse.urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def _trusting(ca_file: str, url: str) -> ssl.SSLContext:
    """A context that verifies names and certificates, and trusts the file's instead of the system's."""
    if not address_of(url).secure:
        raise ValueError(f"ca_file is given, but {shown(url)} is not encrypted: connect to wss://")
    try:
        return ssl.create_default_context(cafile=ca_file)
    except ssl.SSLError as error:
        raise ValueError(f"ca_file {ca_file} holds no certificate in PEM form: {error.reason}") from error
    except OSError as error:
        raise type(error)(error.errno, f"ca_file: {error.strerror}", ca_file) from None


def address_of(url: str) -> WebSocketURI:
    """A URL in its parts.

    Raises:
        InvalidURI: it is none; the library lets some faults through as they come, such as a port out of range.
    """
    try:
        return parse_uri(url)
    except ValueError as error:
        raise InvalidURI(url, str(error)) from None
