"""Where `relay serve` puts its numbers."""

from __future__ import annotations

from dataclasses import fields, replace

from relay.cli.options import ListenerOptions
from relay.cli.serve import _settings


def test_the_metrics_get_the_host_and_port_that_were_asked_for() -> None:
    settings = _settings(ListenerOptions(metrics_host="127.0.0.2", metrics_port=9100))
    assert (settings.metrics_host, settings.metrics_port) == ("127.0.0.2", 9100)


def test_no_number_or_switch_of_the_listener_is_ignored() -> None:
    plain = ListenerOptions()
    for option in fields(ListenerOptions):
        value = getattr(plain, option.name)
        if isinstance(value, (bool, int, float)) and option.name != "direct_fingerprint":  # which needs a certificate
            changed = (not value) if isinstance(value, bool) else value + 1
            assert _settings(replace(plain, **{option.name: changed})) != _settings(plain), option.name
