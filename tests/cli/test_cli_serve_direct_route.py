"""`relay serve`'s options of the direct route: what they set, by flags and in a file, and what does not go together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trustme

from relay.cli.main import main
from relay.cli.serve_file import read_serve_file
from relay.server.tls import certificate_sha256

URL = "wss://gpu-box.example:8443"


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    issued = trustme.CA().issue_cert("gpu-box.example")
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    for blob in issued.cert_chain_pems:
        blob.write_to_path(str(cert), append=True)
    issued.private_key_pem.write_to_path(str(key))
    return cert, key


@pytest.mark.torch
def test_without_flags_there_is_no_direct_route(settings_of: Any) -> None:
    assert settings_of().direct_url is None


@pytest.mark.torch
def test_a_direct_port_has_an_address_and_a_certificate_of_its_own(settings_of: Any, files: tuple[Path, Path]) -> None:
    cert, key = files
    settings = settings_of(
        *("--direct-url", URL, "--direct-port", "8443", "--direct-host", "0.0.0.0", "--direct-fingerprint"),
        *("--direct-tls-cert", str(cert), "--direct-tls-key", str(key), "--max-connections-per-key", "3"),
    )
    assert (settings.direct_url, settings.direct_port, settings.direct_host) == (URL, 8443, "0.0.0.0")
    assert settings.direct_tls is not None
    assert settings.tls is None
    assert settings.direct_cert_sha256 == certificate_sha256(cert)
    assert settings.max_connections_per_key == 3


@pytest.mark.torch
def test_the_main_certificate_serves_the_direct_route_too(settings_of: Any, files: tuple[Path, Path]) -> None:
    cert, key = files
    settings = settings_of(
        *("--direct-url", URL, "--tls-cert", str(cert), "--tls-key", str(key), "--direct-fingerprint")
    )
    assert settings.direct_cert_sha256 == certificate_sha256(cert)


@pytest.mark.torch
def test_a_file_says_the_same_with_paths_beside_it(settings_of: Any, files: tuple[Path, Path], tmp_path: Path) -> None:
    file = tmp_path / "robots.yaml"
    file.write_text(
        f"direct_url: {URL}\ndirect_port: 8443\ndirect_tls_cert: cert.pem\ndirect_tls_key: key.pem\n"
        "direct_fingerprint: true\nmodels: {demo: }\n"
    )
    assert read_serve_file(file).listener.direct_tls_cert == files[0]
    assert settings_of(model=str(file)).direct_cert_sha256 == certificate_sha256(files[0])


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--direct-port", "8443"], "direct_port is given without direct_url"),
        (["--direct-url", "gpu-box:8443"], "expected ws://host[:port]"),
        (["--direct-url", URL, "--direct-fingerprint"], "--direct-fingerprint needs the certificate: give"),
        (["--direct-url", URL, "--direct-port", "1", "--direct-tls-cert", "c.pem"], "--direct-tls-key is missing"),
        (["--direct-url", URL, "--direct-port", "one"], "invalid"),
    ],
)
def test_what_does_not_go_together_ends_it_with_a_sentence(
    flags: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main(["serve", "demo", *flags])
    except SystemExit as ended:
        code = ended.code
    assert code == 2
    assert text in capsys.readouterr().err
