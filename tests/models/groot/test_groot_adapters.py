"""LoRA adapters: an adapter's network equals the checkpoint with the changes worked out by the formula."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from lora import write_peft
from tiny_groot import TinyTensors, described, drawn_noise, drawn_row, load_tiny, tiny_model, tiny_tensors
from torch import Tensor

from relay.engine.weights import CheckpointError
from relay.models.groot.adapters import read_adapter, with_changes
from relay.models.groot.assemble import assemble
from relay.models.groot.model import Groot
from relay.models.groot.resident import ResidentNetworks

DIT = "action_head.model."
BLOCK = DIT + "transformer_blocks."
LANGUAGE = "backbone.model.model.language_model.layers."
VISION = "backbone.model.model.visual."
FEATURES = "action_head.vl_self_attention.transformer_blocks."

TARGETS = {
    "queries of cross-attention": [f"{BLOCK}0.attn1.to_q", f"{BLOCK}2.attn1.to_q"],
    "keys and values of text and images": [f"{BLOCK}{i}.attn1.to_{part}" for i in (0, 2, 4) for part in "kv"],
    "self-attention": [f"{BLOCK}1.attn1.to_q", f"{BLOCK}1.attn1.to_v", f"{BLOCK}3.attn1.to_out.0"],
    "MLPs": [f"{BLOCK}0.ff.net.0.proj", f"{BLOCK}5.ff.net.2"],
    "norms of the time": [f"{BLOCK}0.norm1.linear", f"{BLOCK}7.norm1.linear", f"{DIT}proj_out_1"],
    "the time itself": [f"{DIT}timestep_encoder.timestep_embedder.linear_{i}" for i in (1, 2)],
    "the last layer": [f"{DIT}proj_out_2"],
    "language": [f"{LANGUAGE}0.self_attn.k_proj", f"{LANGUAGE}1.mlp.up_proj", f"{LANGUAGE}3.mlp.down_proj"],
    "features": [f"{FEATURES}0.attn1.to_k", f"{FEATURES}1.ff.net.0.proj"],
    "vision": [
        f"{VISION}blocks.1.attn.qkv",
        f"{VISION}merger.linear_fc2",
        f"{VISION}deepstack_merger_list.0.linear_fc1",
    ],
}
SAVED = [
    "action_head.state_encoder.layer1.W",
    "action_head.action_encoder.W2.W",
    "action_head.action_encoder.W2.b",
    "action_head.action_decoder.layer2.b",
    "action_head.position_embedding.weight",
]


def random_factors(modules: Sequence[str], *, rank: int = 4) -> dict[str, Tensor]:
    """`lora_A` and `lora_B` of these linear layers, large enough to matter."""
    generator, tensors = torch.Generator().manual_seed(0), dict[str, Tensor]()
    for module in modules:
        outputs, inputs = described()["tensors"][module + ".weight"]
        tensors[f"{module}.lora_A.weight"] = torch.randn(rank, inputs, generator=generator) / inputs**0.5
        tensors[f"{module}.lora_B.weight"] = torch.randn(outputs, rank, generator=generator) / (2 * rank**0.5)
    return tensors


def random_tensors(names: Sequence[str]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(described()["tensors"][name], generator=generator) * 0.1 for name in names}


def merged_by_hand(tensors: Mapping[str, Tensor], scale: float = 2.0) -> Groot:
    """The network of the checkpoint that training would have given without LoRA."""
    base = tiny_tensors()
    changed = {name: tensor for name, tensor in tensors.items() if ".lora_" not in name}
    for name, a in tensors.items():
        if name.endswith(".lora_A.weight"):
            module = name.removesuffix(".lora_A.weight")
            product = torch.einsum("or,ri->oi", tensors[f"{module}.lora_B.weight"].double(), a.double())
            changed[module + ".weight"] = base.read(module + ".weight") + scale * product.float()
    return load_tiny(TinyTensors(base, changed))


def write(folder: Path, tensors: Mapping[str, Tensor], *, prefix: str = "base_model.model.") -> Path:
    saved = sorted({name.rpartition(".")[0] for name in tensors if ".lora_" not in name})
    return write_peft(folder, tensors, prefix=prefix, config={"modules_to_save": saved})


def sample(model: Groot) -> Tensor:
    inputs = assemble(model, [drawn_row(1, [(2, 3), (2, 2)], 4)], drawn_noise(1), 4)
    return model.sample_actions(inputs)


def distance(ours: Tensor, reference: Tensor) -> float:
    return float((ours - reference).abs().max() / reference.std())


@pytest.mark.parametrize("kind", list(TARGETS))
def test_an_adapters_network_equals_the_checkpoint_with_its_changes_in_it(kind: str, tmp_path: Path) -> None:
    tensors = random_factors(TARGETS[kind])
    base = tiny_model()
    ours = sample(with_changes(base, read_adapter(write(tmp_path, tensors), base)))
    assert distance(ours, sample(merged_by_hand(tensors))) <= 1e-5
    assert distance(ours, sample(base)) > 1e-4


@pytest.mark.parametrize("name", SAVED)
def test_a_tensor_that_is_saved_in_full_takes_the_place_of_the_bases(name: str, tmp_path: Path) -> None:
    tensors = random_tensors([name])
    base = tiny_model()
    ours = sample(with_changes(base, read_adapter(write(tmp_path, tensors), base)))
    assert distance(ours, sample(merged_by_hand(tensors))) <= 1e-5
    assert distance(ours, sample(base)) > 1e-4


def test_the_base_stays_as_it_was_and_shares_what_is_not_changed(tmp_path: Path) -> None:
    base = load_tiny(tiny_tensors(), slots=[2])
    before = sample(base)
    adapter = read_adapter(write(tmp_path, random_factors(TARGETS["MLPs"]) | random_tensors(SAVED[:1])), base)
    other = with_changes(base, adapter)
    sample(other)
    assert torch.equal(sample(base), before)
    own = [
        name
        for name, parameter in other.named_parameters()
        if parameter.data_ptr() != base.get_parameter(name).data_ptr()
    ]
    assert own == ["dit.blocks.0.mlp.fc1.weight", "dit.blocks.5.mlp.fc2.weight", "maps.2.state_in.weight"]
    assert sorted(own) == sorted(adapter.parameters)


def test_an_adapter_of_lerobots_names_the_network_with_its_own_prefix(tmp_path: Path) -> None:
    tensors, base = random_factors(TARGETS["self-attention"]), tiny_model()
    plain = read_adapter(write(tmp_path / "plain", tensors), base)
    prefixed = read_adapter(write(tmp_path / "lerobot", tensors, prefix="base_model.model._groot_model."), base)
    assert torch.equal(sample(with_changes(base, plain)), sample(with_changes(base, prefixed)))


def test_what_does_not_fit_the_base_is_listed_by_name(tmp_path: Path) -> None:
    tensors = random_factors(TARGETS["MLPs"])
    tensors |= {f"{BLOCK}90.attn1.to_q.lora_{factor}.weight": torch.ones(4, 4) for factor in "AB"}
    tensors[f"{BLOCK}0.ff.net.0.proj.lora_A.weight"] = torch.ones(4, 31)
    tensors["action_head.vlln.weight"] = torch.ones(65)
    with pytest.raises(CheckpointError) as caught:
        read_adapter(write(tmp_path, tensors), tiny_model())
    text = str(caught.value)
    assert f"unknown target: {BLOCK}90.attn1.to_q.weight" in text
    assert f"wrong shape: {BLOCK}0.ff.net.0.proj.weight is (128, 32), lora_A (4, 31)" in text
    assert "wrong shape: action_head.vlln.weight is (65,), expected (64,)" in text


def test_a_layer_that_target_modules_names_and_the_file_lacks_is_an_error(tmp_path: Path) -> None:
    tensors = random_factors([f"{BLOCK}{i}.attn1.to_q" for i in range(7)])
    folder = write_peft(
        tmp_path, tensors, prefix="base_model.model._groot_model.", config={"target_modules": ["attn1.to_q"]}
    )
    with pytest.raises(CheckpointError, match=rf"missing: {BLOCK}7\.attn1\.to_q, which target_modules names"):
        read_adapter(folder, tiny_model())


def test_changes_of_the_unused_norm_are_left_out_with_a_note(tmp_path: Path) -> None:
    norm = "backbone.model.model.language_model.norm.weight"
    adapter = read_adapter(write(tmp_path, random_factors(TARGETS["MLPs"]) | {norm: torch.ones(64)}), tiny_model())
    assert adapter.notes == (f"changes {norm}, which actions do not depend on",)


def test_an_adapter_of_zeros_says_that_it_has_no_effect(tmp_path: Path) -> None:
    zeros = {name: torch.zeros_like(tensor) for name, tensor in random_factors(TARGETS["MLPs"]).items()}
    assert read_adapter(write(tmp_path, zeros), tiny_model()).notes == ("has no effect: all its changes are zero",)


@pytest.mark.parametrize("what", ["nothing", "file"])
def test_a_folder_without_an_adapter_is_refused(what: str, tmp_path: Path) -> None:
    if what == "file":
        (tmp_path / what).write_text("")
    expected = "is not a folder" if what == "file" else r"expected adapter_config\.json of PEFT"
    with pytest.raises(CheckpointError, match=expected):
        read_adapter(tmp_path / what if what == "file" else tmp_path, tiny_model())


def test_the_network_used_longest_ago_makes_room(tmp_path: Path) -> None:
    base = tiny_model()
    modules = [f"{BLOCK}{i}.attn1.to_out.0" for i in range(3)]
    first, second, third = (read_adapter(write(tmp_path / m, random_factors([m])), base) for m in modules)
    resident = ResidentNetworks(base, memory_bytes=2 * 32 * 32 * 4)
    networks = {adapter: resident.network(adapter) for adapter in (first, second)}
    assert resident.network(None) is base
    assert resident.network(first) is networks[first]
    resident.network(third)
    assert resident.network(first) is networks[first]
    assert resident.network(second) is not networks[second]
