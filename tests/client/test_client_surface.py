"""The clients have one surface: the same names, arguments and defaults, awaited in `AsyncPolicy`."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from relay import AsyncPolicy, Policy, PolicyClient

CLIENTS = [Policy, AsyncPolicy, PolicyClient]
AWAITED = {"infer", "reset", "close"}


def surface(client: type) -> dict[str, Any]:
    return {name: value for name, value in vars(client).items() if not name.startswith("_")}


def arguments(function: Any) -> list[tuple[str, Any, Any]]:
    return [(each.name, each.kind, each.default) for each in inspect.signature(function).parameters.values()]


@pytest.mark.parametrize("client", [AsyncPolicy, PolicyClient])
def test_all_clients_have_the_same_names(client: type) -> None:
    assert set(surface(client)) == set(surface(Policy))


@pytest.mark.parametrize("client", [AsyncPolicy, PolicyClient])
@pytest.mark.parametrize("name", sorted(surface(Policy)))
def test_a_name_means_the_same_on_all_clients(client: type, name: str) -> None:
    ours, theirs = surface(Policy)[name], surface(client)[name]
    assert isinstance(theirs, property) == isinstance(ours, property)
    if not isinstance(ours, property):
        assert arguments(theirs) == arguments(ours)


@pytest.mark.parametrize("name", sorted(surface(AsyncPolicy)))
def test_what_uses_the_network_is_awaited(name: str) -> None:
    assert inspect.iscoroutinefunction(surface(AsyncPolicy)[name]) == (name in AWAITED)
    assert not inspect.iscoroutinefunction(surface(Policy)[name])


def test_async_policy_is_made_like_policy() -> None:
    assert arguments(AsyncPolicy) == arguments(Policy)


def test_policy_client_takes_the_same_options_by_name() -> None:
    policy = {name: default for name, _, default in arguments(Policy) if name not in ("url", "codec")}
    client = {name: default for name, _, default in arguments(PolicyClient) if name not in ("model", "codec")}
    assert client == {**policy, "direct": True}


@pytest.mark.parametrize("client", [Policy, AsyncPolicy])
def test_only_policy_client_takes_a_direct_route_unasked(client: type) -> None:
    assert inspect.signature(client).parameters["direct"].default is False


@pytest.mark.parametrize("client", CLIENTS)
def test_nothing_is_given_up_unless_asked(client: type) -> None:
    assert inspect.signature(client).parameters["connect_timeout"].default is None
    for name in ("infer", "reset"):
        assert inspect.signature(getattr(client, name)).parameters["timeout"].default is None


def test_each_client_closes_with_its_block() -> None:
    assert hasattr(Policy, "__enter__")
    assert hasattr(PolicyClient, "__enter__")
    assert hasattr(AsyncPolicy, "__aenter__")
