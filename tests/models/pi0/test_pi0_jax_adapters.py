"""openpi's JAX trees with LoRA: their changes against weights that openpi's own einsums amount to."""

from __future__ import annotations

import json
import math
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from folders import ORBAX_PYTHON
from lora import jax_tree
from safetensors.torch import save_file
from test_pi0_adapters import distance, sample
from tiny import DATA, Tensors, load_tiny, tiny_model, tiny_tensors
from torch import Tensor

from relay.engine.adapters import Adapter
from relay.engine.weights import CheckpointError
from relay.models.pi0.adapters import base_tensors, pack, read_adapter, with_changes
from relay.models.pi0.formats import open_tensors
from relay.models.pi0.jax_adapters import read_jax_adapter
from relay.models.pi0.jax_names import RULES
from relay.models.pi0.weights import checkpoint_shapes

FAMILIES = pytest.mark.parametrize("family", ["pi0", "pi05"])
SHIPPED = {"language": 16, "expert": 32}


class Arrays(Tensors):
    """JAX arrays in memory."""

    def read_layer(self, name: str, layer: int) -> Tensor:
        return self[name][layer]


def full_tree(family: str, changed: Mapping[str, Tensor] | None = None) -> Arrays:
    """The golden weights as the JAX tree that they came from: what is frozen in bfloat16, the rest in float32."""
    tensors = {name: tensor.float() for name, tensor in tiny_tensors(family).items()} | dict(changed or {})
    arrays = Arrays()
    for rule in RULES:
        layers = [rule.torch.replace("*", str(layer)) for layer in range(3)]
        found = [tensors[name] for name in dict.fromkeys(layers) if name in tensors]
        if not found or rule.jax in arrays:
            continue
        jax = _to_jax(rule.torch, rule.jax, found, tensors)
        arrays[rule.jax] = jax.bfloat16() if "/llm/" in rule.jax else jax
    return arrays


def _to_jax(torch_name: str, jax_name: str, layers: list[Tensor], tensors: Mapping[str, Tensor]) -> Tensor:
    """The inverse layouts, written out once more."""

    def sibling(old: str, new: str) -> list[Tensor]:
        return [tensors[torch_name.replace("*", str(i)).replace(old, new)] for i in range(len(layers))]

    def heads_out(x: Tensor, n: int) -> Tensor:  # (N * H, D) -> (D, N, H)
        return x.T.reshape(x.shape[1], n, -1)

    if "q_einsum" in jax_name:
        each = [x.reshape(8, -1, x.shape[1]).transpose(1, 2) for x in layers]
    elif "kv_einsum" in jax_name:
        each = [torch.stack((k.T, v.T))[:, None] for k, v in zip(layers, sibling("k_proj", "v_proj"), strict=True)]
    elif "attn_vec" in jax_name:
        each = [x.T.reshape(8, -1, x.shape[0]) for x in layers]
    elif "gating" in jax_name:
        each = [torch.stack((g.T, u.T)) for g, u in zip(layers, sibling("gate_proj", "up_proj"), strict=True)]
    elif jax_name.endswith("embedding/kernel"):
        each = [x.permute(2, 3, 1, 0) for x in layers]
    elif jax_name.endswith("pos_embedding"):
        each = [x[None] for x in layers]
    elif any(f"/{part}/kernel" in jax_name for part in ("query", "key", "value")):
        each = [heads_out(x, 2) for x in layers]
    elif any(f"/{part}/bias" in jax_name for part in ("query", "key", "value")):
        each = [x.reshape(2, -1) for x in layers]
    elif "/out/kernel" in jax_name:
        each = [x.T.reshape(2, -1, x.shape[0]) for x in layers]
    elif jax_name.endswith(("kernel", "linear")):
        each = [x.T for x in layers]
    else:
        each = layers
    return torch.stack(each).contiguous() if "*" in torch_name else each[0].contiguous()


def read(family: str, arrays: Arrays, folder: Path) -> Adapter:
    model = tiny_model(family)
    shapes = checkpoint_shapes(model.config)
    return read_jax_adapter(cast("Any", arrays), base_tensors(model), shapes, folder / "relay.json")


@FAMILIES
@pytest.mark.parametrize("ranks", [SHIPPED, {"language": 16}, {"expert": 32}], ids=["both", "language", "expert"])
def test_the_changes_are_what_the_einsums_of_openpi_amount_to(
    family: str, ranks: dict[str, int], tmp_path: Path
) -> None:
    leaves, expected = jax_tree(family, ranks=ranks)
    adapter = read(family, Arrays(full_tree(family) | leaves), tmp_path)
    assert not adapter.replaced
    weights = base_tensors(with_changes(tiny_model(family), adapter))
    for name, tensor in weights.items():
        assert torch.allclose(tensor, expected[name], rtol=1e-5, atol=1e-5), name
    assert sum(not torch.equal(weights[name], tiny_tensors(family)[name].float()) for name in weights) == 21 * len(
        ranks
    )


@FAMILIES
def test_it_acts_beside_the_weights_as_in_them(family: str, tmp_path: Path) -> None:
    leaves, expected = jax_tree(family, ranks=SHIPPED)
    base = tiny_model(family)
    adapter = pack(read(family, Arrays(full_tree(family) | leaves), tmp_path), base)
    assert not adapter.alone
    together = sample(base, family, (0, 1), [adapter, None])
    assert distance(together[:1], sample(load_tiny(expected), family, (0,))) <= 1e-4
    assert distance(together[1:], sample(base, family, (1,))) <= 1e-5


@FAMILIES
def test_what_was_trained_in_full_takes_the_place_of_the_base(family: str, tmp_path: Path) -> None:
    leaves, expected = jax_tree(family, ranks=SHIPPED)
    trained = {
        name: tensor.float() * 1.05 + 0.01
        for name, tensor in tiny_tensors(family).items()
        if not name.startswith("paligemma_with_expert") or "vision_tower" in name or "projector" in name
    }
    expected.update(trained)
    base = tiny_model(family)
    source = read(family, Arrays(full_tree(family, trained) | leaves), tmp_path)
    assert source.replaced.keys() == trained.keys()
    adapter = pack(source, base)
    assert not adapter.alone
    together = sample(base, family, (0, 1, 1), [adapter, None, adapter])
    assert distance(together[[0, 2]], sample(load_tiny(expected), family, (0, 1))) <= 1e-4
    assert distance(together[1:2], sample(base, family, (1,))) <= 1e-5


def test_frozen_weights_that_were_rounded_to_bfloat16_are_the_bases(tmp_path: Path) -> None:
    leaves, _ = jax_tree("pi05", ranks=SHIPPED)
    exact = Tensors({name: tensor.float() * (1 + 2**-12) for name, tensor in tiny_tensors("pi05").items()})
    base = load_tiny(exact)  # a base in float32, which bfloat16 cannot hold
    arrays = Arrays(full_tree("pi05", exact) | leaves)
    shapes = checkpoint_shapes(base.config)
    adapter = read_jax_adapter(cast("Any", arrays), base_tensors(base), shapes, tmp_path / "relay.json")
    assert not adapter.replaced


def test_an_expert_that_was_trained_in_full_runs_in_a_network_of_its_own(tmp_path: Path) -> None:
    leaves, expected = jax_tree("pi05", ranks={"language": 16})
    trained = {
        name: (1.25 * tensor.float()).bfloat16().float()
        for name, tensor in tiny_tensors("pi05").items()
        if "gemma_expert" in name
    }
    expected.update(trained)
    adapter = pack(read("pi05", Arrays(full_tree("pi05", trained) | leaves), tmp_path), tiny_model("pi05"))
    assert adapter.alone
    actions = sample(tiny_model("pi05"), "pi05", (0, 1), [adapter, adapter])
    assert distance(actions, sample(load_tiny(expected), "pi05", (0, 1))) <= 1e-4


def test_a_rank_that_openpi_does_not_ship_needs_its_alpha(tmp_path: Path) -> None:
    leaves, _ = jax_tree("pi05", ranks={"expert": 4})
    arrays = Arrays(full_tree("pi05") | leaves)
    with pytest.raises(CheckpointError, match=r"the expert tower's LoRA has rank 4, .* alpha: write .*relay\.json"):
        read("pi05", arrays, tmp_path)
    name = "paligemma_with_expert.gemma_expert.model.layers.1.self_attn.k_proj.weight"
    plain = "paligemma_with_expert.gemma_expert.model.layers.1.mlp.up_proj.weight"
    deltas, unscaled = {}, []
    for alpha, rslora in ((4, False), (8, False), (8, True)):
        settings = {"lora_alpha": {"expert": alpha}, "rslora": rslora}
        (tmp_path / "relay.json").write_text(json.dumps(settings))
        pairs = read("pi05", arrays, tmp_path).pairs
        deltas[alpha, rslora] = pairs[name].delta
        unscaled.append(pairs[plain].delta)
    assert torch.allclose(deltas[8, False], 2 * deltas[4, False])
    assert torch.allclose(deltas[8, True], 4 * deltas[4, False])
    assert all(torch.equal(delta, unscaled[0]) for delta in unscaled)  # openpi leaves alpha out in the MLP


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"lora_alpha": {"expert": -1}}, "lora_alpha says 'expert': -1; expected a positive number"),
        ({"lora_alpha": {"expert": math.nan}}, "lora_alpha says 'expert': nan"),
        ({"lora_alpha": {"experts": 4}}, "lora_alpha says 'experts': 4"),
        ({"lora_alpha": [4]}, "lora_alpha is"),
        ({"lora_alpha": {"expert": 4}, "rslora": "no"}, "rslora is 'no'"),
        ({"lora_alfa": {"expert": 4}}, "unknown key 'lora_alfa', did you mean 'lora_alpha'"),
    ],
)
def test_settings_that_cannot_be_honoured_are_named(settings: dict[str, Any], text: str, tmp_path: Path) -> None:
    leaves, _ = jax_tree("pi05", ranks={"expert": 4})
    (tmp_path / "relay.json").write_text(json.dumps(settings))
    with pytest.raises(CheckpointError) as refusal:
        read("pi05", Arrays(full_tree("pi05") | leaves), tmp_path)
    assert text in str(refusal.value)


@pytest.mark.parametrize("name", ["PaliGemma/llm/layers/attn/q_einsum_1/lora_b", "PaliGemma/llm/layers/mlp/linear"])
def test_a_missing_leaf_is_named(name: str, tmp_path: Path) -> None:
    leaves, _ = jax_tree("pi05", ranks=SHIPPED)
    arrays = Arrays(full_tree("pi05") | leaves)
    del arrays[name]
    with pytest.raises(CheckpointError, match=r"missing: .*(lora_b|down_proj)"):
        read("pi05", arrays, tmp_path)


@pytest.mark.parametrize("name", ["PaliGemma/llm/layers/attn/o_einsum/lora_a", "surprise/kernel"])
def test_an_unknown_leaf_is_named(name: str, tmp_path: Path) -> None:
    leaves, _ = jax_tree("pi05", ranks=SHIPPED)
    with pytest.raises(CheckpointError, match=f"unknown: {name}"):
        read("pi05", Arrays(full_tree("pi05") | leaves | {name: torch.ones(3, 2, 2)}), tmp_path)


def test_factors_that_are_no_pair_are_named_with_their_shapes(tmp_path: Path) -> None:
    leaves, _ = jax_tree("pi05", ranks=SHIPPED)
    name = "PaliGemma/llm/layers/attn/q_einsum/lora_b"
    leaves[name] = leaves[name][:, :, :7]
    with pytest.raises(CheckpointError, match=r"q_einsum/lora_a and .*q_einsum/lora_b have the shapes"):
        read("pi05", Arrays(full_tree("pi05") | leaves), tmp_path)


def test_a_tree_without_lora_is_a_checkpoint_of_its_own(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="has no lora_a and lora_b: serve it as a checkpoint"):
        read("pi05", full_tree("pi05"), tmp_path)


@pytest.fixture
def written(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Path, Tensors]:
    """A family, a folder that Orbax wrote, and the weights that it amounts to."""
    pytest.importorskip("tensorstore", reason="tensorstore is not here: pip install 'relay-robotics[jax]'")
    if not ORBAX_PYTHON.exists():
        pytest.skip("Orbax is not here; `make references` installs it")
    family = request.param
    leaves, expected = jax_tree(family, ranks=SHIPPED)
    save_file(leaves, tmp_path / "leaves.safetensors")
    script, weights = Path(__file__).with_name("write_orbax.py"), DATA / f"{family}_tiny.safetensors"
    options = ["--value", "--dtype", "float32", "--leaves", tmp_path / "leaves.safetensors"]
    command = [ORBAX_PYTHON, script, weights, tmp_path / "trained/params", *options]
    done = subprocess.run(command, env={"JAX_PLATFORMS": "cpu"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return family, tmp_path / "trained", expected


@pytest.mark.parametrize("written", ["pi0", "pi05"], indirect=True)
def test_a_folder_that_orbax_wrote_is_an_adapter(written: tuple[str, Path, Tensors]) -> None:
    family, folder, expected = written
    adapter = read_adapter(folder, tiny_model(family))
    actions = sample(tiny_model(family), family, (0, 1), [adapter, adapter])
    assert distance(actions, sample(load_tiny(expected), family, (0, 1))) <= 1e-4


@pytest.mark.parametrize("written", ["pi0", "pi05"], indirect=True)
def test_as_a_checkpoint_of_its_own_it_has_its_changes_in_the_weights(written: tuple[str, Path, Tensors]) -> None:
    _, folder, expected = written
    loaded = load_tiny(open_tensors(folder, "openpi-jax"))
    for (name, parameter), wanted in zip(loaded.named_parameters(), load_tiny(expected).parameters(), strict=True):
        assert torch.allclose(parameter, wanted, rtol=1e-5, atol=1e-5), name
