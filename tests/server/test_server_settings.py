"""Settings that cannot work are refused when they are made."""

from __future__ import annotations

import re
from typing import Any

import pytest

from relay.server.api_keys import ApiKeys, read_api_keys
from relay.server.settings import ServerSettings


def test_the_default_is_loopback():
    assert ServerSettings().host == "127.0.0.1"


@pytest.mark.parametrize(
    "wrong",
    [
        {"port": 70_000},
        {"max_batch": 0},
        {"prepare_threads": 0},
        {"drain_seconds": -1.0},
        {"idle_timeout": -0.5},
        {"seed": 2**64},
    ],
)
def test_a_value_out_of_range_is_named(wrong: dict[str, Any]):
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} must .*{next(iter(wrong.values()))}"):
        ServerSettings(**wrong)


@pytest.mark.parametrize(
    "origin", ["dash.example", "https://dash.example/", "https://Dash.example", "https://", "null", "https://a b"]
)
def test_an_origin_that_would_never_match_is_refused(origin: str):
    with pytest.raises(ValueError, match=rf"allowed_origin is '{origin}'; expected scheme://host"):
        ServerSettings(allowed_origins=(origin,))


@pytest.mark.parametrize("host", ["robots.example:8000", "http://robots.example", "::1", "[::1]:80", ""])
def test_a_host_that_would_never_match_is_refused(host: str):
    with pytest.raises(ValueError, match=r"allowed_host is .*; expected a name or an address without a port"):
        ServerSettings(allowed_hosts=(host,))


def test_one_key_is_one_tenant_and_two_are_several():
    assert not ServerSettings(api_keys=ApiKeys()).several_tenants
    assert not ServerSettings(api_keys=ApiKeys(frozenset({b"a"}))).several_tenants
    assert ServerSettings(api_keys=ApiKeys(frozenset({b"a", b"b"}))).several_tenants


def test_keys_in_the_environment_hold_for_servers_of_ones_own_too(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RELAY_API_KEYS", "0123456789abcdef")
    assert ServerSettings().api_keys.holds("0123456789abcdef")


def test_the_settings_print_neither_keys_nor_digests():
    settings = ServerSettings(api_keys=read_api_keys(environment={"RELAY_API_KEYS": "0123456789abcdef"}))
    assert not re.search(r"0123|api_keys|digest", repr(settings))


def test_an_unknown_handshake_is_refused_with_the_nearest():
    wrong: Any = "RoboArena"
    with pytest.raises(
        ValueError, match=r"handshake must be 'openpi' or 'roboarena', got 'RoboArena'; did you mean 'rob"
    ):
        ServerSettings(handshake=wrong)
