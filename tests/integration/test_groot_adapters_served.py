"""LoRA adapters of GR00T over a real socket: each request gets its own, and merged ones need not be asked for."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from groot_folders import LIBERO, observation, shapes, write_isaac
from lora import write_peft
from numpy.typing import NDArray
from threaded_server import serving

import relay
from relay.engine.adapter_folders import AdapterChoice
from relay.models import registry

pytestmark = pytest.mark.vocab

BLOCK = "action_head.model.transformer_blocks."
TARGETS = {
    "fold": [f"{BLOCK}{i}.attn1.to_{part}" for i in (0, 1, 2) for part in "qv"],
    "pour": [f"{BLOCK}3.ff.net.0.proj", f"{BLOCK}0.norm1.linear"],
}
DECODER = "action_head.action_decoder.layer2.b"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_isaac(tmp_path_factory.mktemp("groot"))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two adapters; the second one brings a tensor of the embodiment's maps in full."""
    root = tmp_path_factory.mktemp("adapters")
    generator = torch.Generator().manual_seed(0)
    for name, modules in TARGETS.items():
        tensors: dict[str, torch.Tensor] = {}
        for module in modules:
            outputs, inputs = shapes()[f"{module}.weight"]
            tensors[f"{module}.lora_A.weight"] = torch.randn(4, inputs, generator=generator) / inputs**0.5
            tensors[f"{module}.lora_B.weight"] = torch.randn(outputs, 4, generator=generator) / 4
        if name == "pour":
            tensors[DECODER] = torch.randn(shapes()[DECODER], generator=generator) * 0.1
        saved = [DECODER.rpartition(".")[0]] if name == "pour" else []
        write_peft(root / name, tensors, config={"modules_to_save": saved})
    return root


def load(folder: Path, adapters: AdapterChoice | None = None, **choices: Any) -> Any:
    chosen = {} if adapters is None else {"adapters": adapters}
    return registry.load("groot", checkpoint=folder, device="cpu", **{"max_batch": 1, **chosen, **choices})


def ask(policy: relay.Policy, asked: Mapping[str, Any], adapter: str | None = None) -> NDArray[np.float32]:
    """(horizon, 7), all groups side by side."""
    named = {} if adapter is None else {"adapter_dir": adapter}
    actions = policy.infer({**asked, "seed": 7, **named})["actions"]
    return np.concatenate([group[0] for group in actions.values()], axis=-1)


def once(url: str, asked: Mapping[str, Any], adapter: str | None) -> NDArray[np.float32]:
    with relay.Policy(url, relay.Codec.RAW) as policy:
        return ask(policy, asked, adapter)


def test_each_request_gets_the_adapter_it_names_and_the_base_stays(folder: Path, root: Path) -> None:
    asked = observation(LIBERO)
    with serving(load(folder)) as url:
        plain = once(url, asked, None)
    with (
        serving(load(folder, AdapterChoice(root=root))) as url,
        relay.Policy(url, relay.Codec.RAW) as policy,
    ):
        fold, base, pour, again = (ask(policy, asked, name) for name in ("fold", "base", "pour", "fold"))
    np.testing.assert_array_equal(base, plain)
    np.testing.assert_array_equal(again, fold)
    assert np.abs(fold - plain).max() > 1e-3
    assert np.abs(pour - plain).max() > 1e-3
    assert np.abs(pour - fold).max() > 1e-3


@pytest.mark.parametrize("name", list(TARGETS))
def test_a_merged_adapter_gives_the_same_and_needs_no_name(name: str, folder: Path, root: Path) -> None:
    asked = observation(LIBERO)
    with serving(load(folder, AdapterChoice(root=root))) as url:
        named = once(url, asked, name)
    merged = AdapterChoice(named={name: root / name}, default=name, merged=True)
    with serving(load(folder, merged)) as url:
        assert np.abs(once(url, asked, None) - named).max() <= 1e-5 * named.std()
        with pytest.raises(RuntimeError, match=f"this server has merged '{name}' into the weights"):
            once(url, asked, "base")


def test_requests_of_different_adapters_at_the_same_time_get_their_own(folder: Path, root: Path) -> None:
    asked, names = observation(LIBERO), [None, "fold", "pour"]
    with serving(load(folder, AdapterChoice(root=root), max_batch=4)) as url:
        alone = [once(url, asked, name) for name in names]
        with ThreadPoolExecutor(6) as pool:
            together = list(pool.map(lambda name: once(url, asked, name), names * 2))
    for number, actions in enumerate(together):
        assert np.abs(actions - alone[number % 3]).max() <= 1e-4


def test_an_unknown_adapter_is_refused_with_the_names_that_are_held(folder: Path, root: Path) -> None:
    with (
        serving(load(folder, AdapterChoice(root=root))) as url,
        pytest.raises(RuntimeError, match="this server holds: fold, pour; did you mean 'fold'"),
    ):
        once(url, observation(LIBERO), "folds")


def test_without_adapters_naming_one_is_refused(folder: Path) -> None:
    with serving(load(folder)) as url, pytest.raises(RuntimeError, match="fold"):
        once(url, observation(LIBERO), "fold")
