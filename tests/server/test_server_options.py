"""Which options are refused, and the server's default seed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from fake_policy import SPEC

from relay.protocol.errors import ObservationError
from relay.protocol.messages import Options
from relay.server.options import admit, option_keys, unknown_adapter

REAL_TIME = {"prev_actions": np.zeros((2, 3), np.float32), "inference_delay": 1, "execution_horizon": 2}


ADAPTING = replace(SPEC, supported_options=frozenset({"adapter"}))


def test_an_adapter_is_refused_with_what_the_server_holds():
    with pytest.raises(ObservationError, match="adapter 'fold' is not loaded; this server holds: none"):
        admit(Options(adapter="fold"), SPEC, None)


def test_an_unknown_adapter_is_answered_with_the_names_of_those_held():
    assert str(unknown_adapter("fold", ("pour", "stack"), named=True)) == (
        "adapter 'fold' is not loaded; this server holds: pour, stack"
    )


def test_the_nearest_name_is_told_with_those_held():
    with pytest.raises(ObservationError, match="this server holds: pour, stack; did you mean 'stack'"):
        admit(Options(adapter="stakc"), ADAPTING, None, adapters=("pour", "stack"))


@pytest.mark.parametrize("name", ["pour", "base"])
def test_an_adapter_that_is_held_is_admitted_and_so_is_none(name: str):
    assert admit(Options(adapter=name), ADAPTING, None, adapters=("pour",)).adapter == name


def test_base_is_unknown_where_there_are_no_adapters():
    with pytest.raises(ObservationError, match="adapter 'base' is not loaded; this server holds: none"):
        admit(Options(adapter="base"), ADAPTING, None, adapters=())


def test_the_options_are_told_by_their_request_keys():
    assert option_keys(replace(SPEC, supported_options=frozenset({"adapter", *REAL_TIME}))) == (
        "adapter_dir, deadline_ms, execution_horizon, inference_delay, prev_actions"
    )


def test_a_thousand_names_are_told_in_part():
    names = [f"adapter-{number:04}" for number in range(1_000)]
    text = str(unknown_adapter("fold", names, named=True))
    assert "adapter-0000" in text
    assert len(text) < 3_000


def test_tenants_do_not_read_the_names_of_each_others_adapters():
    assert str(unknown_adapter("fold", ("pour", "stack"), named=False)) == "adapter 'fold' is not loaded"
    with pytest.raises(ObservationError, match=r"adapter 'fold' is not loaded$"):
        admit(Options(adapter="fold"), SPEC, None, name_adapters=False)
    with pytest.raises(ObservationError, match=r"adapter 'stakc' is not loaded$"):
        admit(Options(adapter="stakc"), ADAPTING, None, adapters=("stack",), name_adapters=False)


@pytest.mark.parametrize("options", [Options(**REAL_TIME), Options(executed_actions=np.zeros((1, 3), np.float32))])
def test_what_the_policy_would_ignore_is_refused_by_name(options: Options):
    with pytest.raises(ObservationError, match=r"is not an option of fake; it takes: deadline_ms, noise"):
        admit(options, SPEC, None)


def test_what_the_policy_supports_passes():
    spec = replace(SPEC, supported_options=frozenset({"adapter", *REAL_TIME}))
    options = Options(adapter="fold", **REAL_TIME)
    assert admit(options, spec, None) is options


def test_a_deadline_is_always_accepted():
    admit(Options(deadline_ms=40.0), replace(SPEC, supported_options=frozenset()), None)


@pytest.mark.parametrize("steps", [0, 51])
def test_num_steps_has_bounds(steps: int):
    with pytest.raises(ObservationError, match=f"num_steps must be between 1 and 50, got {steps}"):
        admit(Options(num_steps=steps), SPEC, None)


def test_a_policy_of_many_steps_takes_up_to_four_times_its_own():
    admit(Options(num_steps=400), replace(SPEC, num_steps=100), None)


def test_the_default_seed_fills_an_open_request_only():
    assert admit(Options(), SPEC, 7).seed == 7
    assert admit(Options(seed=1), SPEC, 7).seed == 1
    assert admit(Options(noise=np.zeros((4, 3), np.float32)), SPEC, 7).seed is None
    assert admit(Options(), replace(SPEC, supported_options=frozenset()), 7).seed is None
