"""Adapters applied beside the shared weights, row by row, against networks that have the same changes in their weights.

Those networks are loaded from checkpoints whose weights were worked out by hand (see `lora.py`), never by the code
under test. Distances are of actions in units of their standard deviation, in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from lora import EXPERT, EXPERT_ATTENTION, LANGUAGE, VISION, merged_by_hand, random_factors, write_peft
from safetensors.torch import load_file
from tiny import DATA, Tensors, golden_inputs, load_tiny, tiny_model, tiny_tensors
from torch import Tensor

from relay.engine.adapter_rows import ChangeTables
from relay.engine.weights import CheckpointError
from relay.models.pi0.adapters import Pi0Adapter, base_tensors, linear_shapes, read_adapter, with_changes
from relay.models.pi0.model import Pi0
from relay.models.pi0.resident import ResidentAdapters

ADAPTERS = DATA / "adapters"
HEADS = {
    "pi0": ["state_proj", "action_in_proj", "action_out_proj", "action_time_mlp_in", "action_time_mlp_out"],
    "pi05": ["action_in_proj", "action_out_proj"],
}
PREFIX = [
    *(f"{LANGUAGE}{layer}.self_attn.{part}_proj" for layer in range(3) for part in "qkvo"),
    *(f"{LANGUAGE}{layer}.mlp.{part}_proj" for layer in range(3) for part in ("gate", "up", "down")),
]
TIME = {
    "pi0": ["action_time_mlp_in"],
    "pi05": ["time_mlp_in", "time_mlp_out", f"{EXPERT}1.post_attention_layernorm.dense"],
}
EYES = [f"{VISION}encoder.layers.0.self_attn.k_proj", f"{VISION}encoder.layers.0.mlp.fc1"]

CASES = {
    "expert": lambda family: EXPERT_ATTENTION,
    "heads": lambda family: HEADS[family],
    "prefix": lambda family: PREFIX,
    "last layer's keys": lambda family: [f"{LANGUAGE}2.self_attn.k_proj"],
    "expert's MLP": lambda family: [f"{EXPERT}1.mlp.gate_proj", f"{EXPERT}2.mlp.down_proj"],
    "time": lambda family: TIME[family],
    "vision": lambda family: EYES,
    "projector": lambda family: ["paligemma_with_expert.paligemma.model.multi_modal_projector.linear"],
    "all": lambda family: [*EXPERT_ATTENTION, *HEADS[family], *PREFIX, *TIME[family], *EYES][
        :: 1 if family == "pi05" else 2
    ],
}

FAMILIES = pytest.mark.parametrize("family", ["pi0", "pi05"])


def modules(case: str, family: str) -> list[str]:
    return list(dict.fromkeys(CASES[case](family)))


def sample(
    model: Pi0,
    family: str,
    rows: Sequence[int],
    adapters: Sequence[Pi0Adapter | None] | None = None,
    steps: Sequence[int] | None = None,
) -> Tensor:
    """Actions of golden observations, each row with its adapter, as the engine would run them."""
    adapters, steps = adapters or [None] * len(rows), steps or [4] * len(rows)
    held = tuple(dict.fromkeys(adapter for adapter in adapters if adapter is not None))
    resident = ResidentAdapters(model, lambda: held, 2**30)
    actions: dict[int, Tensor] = {}
    for group in resident.groups(adapters):
        inputs = golden_inputs(family, [rows[i] for i in group], [steps[i] for i in group])
        counts = [IMAGES[rows[i]] for i in group]
        network, inputs = resident.apply(inputs, [adapters[i] for i in group], counts)
        actions |= dict(zip(group, network.sample_actions(inputs), strict=True))
    return torch.stack([actions[i] for i in range(len(rows))])


IMAGES = (2, 3)
"""How many cameras the golden rows have."""


def distance(a: Tensor, b: Tensor) -> float:
    return ((a - b).abs().max() / b.std()).item()


@FAMILIES
@pytest.mark.parametrize("case", CASES)
def test_an_adapter_beside_the_weights_acts_like_one_in_them(case: str, family: str, tmp_path: Path) -> None:
    base = tiny_model(family)
    factors = random_factors(family, modules(case, family))
    adapter = read_adapter(write_peft(tmp_path, factors), base)
    expected = sample(load_tiny(merged_by_hand(family, factors)), family, (0, 1))
    assert distance(sample(base, family, (0, 1), [adapter, adapter]), expected) <= 1e-5
    assert distance(expected, sample(base, family, (0, 1))) > 1e-3  # the adapter matters


@FAMILIES
@pytest.mark.parametrize("case", CASES)
def test_a_merged_network_has_the_weights_worked_out_by_hand(case: str, family: str, tmp_path: Path) -> None:
    base = tiny_model(family)
    before = {name: parameter.clone() for name, parameter in base.named_parameters()}
    factors = random_factors(family, modules(case, family))
    merged = with_changes(base, read_adapter(write_peft(tmp_path, factors), base).source)
    expected = load_tiny(merged_by_hand(family, factors))
    for (name, parameter), wanted in zip(merged.named_parameters(), expected.parameters(), strict=True):
        assert torch.allclose(parameter, wanted, rtol=1e-6, atol=1e-6), name
    assert all(torch.equal(parameter, before[name]) for name, parameter in base.named_parameters())


def test_a_merged_network_shares_what_is_not_changed(tmp_path: Path) -> None:
    base = tiny_model("pi05")
    factors = random_factors("pi05", [f"{EXPERT}0.self_attn.q_proj"])
    merged = with_changes(base, read_adapter(write_peft(tmp_path, factors), base).source)
    own = [name for name, p in merged.named_parameters() if p.data_ptr() != base.get_parameter(name).data_ptr()]
    assert own == ["expert.0.qkv.weight"]


def test_merging_in_bfloat16_rounds_once_from_the_kept_base(tmp_path: Path) -> None:
    base = tiny_model("pi05", torch.bfloat16)
    name = f"{EXPERT}0.self_attn.o_proj"
    factors = random_factors("pi05", [name])
    merged = with_changes(base, read_adapter(write_peft(tmp_path, factors), base).source)
    exact = merged_by_hand("pi05", factors)[name + ".weight"]
    assert torch.equal(merged.expert[0].out.weight, exact.bfloat16())


@FAMILIES
def test_rows_with_three_adapters_and_none_equal_their_own_runs(family: str, tmp_path: Path) -> None:
    base = tiny_model(family)
    cases = {"expert": 1, "all": 2, "heads": 3}
    factors = {
        case: random_factors(family, modules(case, family), seed=seed, rank=2 * seed) for case, seed in cases.items()
    }
    adapters: list[Pi0Adapter | None] = [
        read_adapter(write_peft(tmp_path / case, f, config={"r": 2 * cases[case], "lora_alpha": 4 * cases[case]}), base)
        for case, f in factors.items()
    ]
    together = sample(base, family, (0, 1, 1, 0), [*adapters, None])
    for number, (row, f) in enumerate(zip((0, 1, 1), factors.values(), strict=True)):
        alone = sample(load_tiny(merged_by_hand(family, f)), family, (row,))
        assert distance(together[number], alone[0]) <= 1e-4
    assert distance(together[3], sample(base, family, (0,))[0]) <= 1e-5


@FAMILIES
def test_rows_of_the_base_alone_are_bit_equal_to_a_network_without_adapters(family: str, tmp_path: Path) -> None:
    base = tiny_model(family)
    adapter = read_adapter(write_peft(tmp_path, random_factors(family, EXPERT_ATTENTION)), base)
    before = base.sample_actions(golden_inputs(family, (1,), 4))
    sample(base, family, (0, 1), [adapter, None])
    assert torch.equal(sample(base, family, (1,), [None]), before)


@FAMILIES
def test_rows_of_different_numbers_of_steps_keep_their_adapters(family: str, tmp_path: Path) -> None:
    base = tiny_model(family)
    factors = random_factors(family, modules("all", family))
    adapter = read_adapter(write_peft(tmp_path, factors), base)
    together = sample(base, family, (0, 1, 1), [adapter, None, adapter], [2, 4, 5])
    merged = load_tiny(merged_by_hand(family, factors))
    assert distance(together[0], sample(merged, family, (0,), steps=[2])[0]) <= 1e-4
    assert distance(together[1], sample(base, family, (1,), steps=[4])[0]) <= 1e-4
    assert distance(together[2], sample(merged, family, (1,), steps=[5])[0]) <= 1e-4


@FAMILIES
def test_heads_that_are_saved_in_full_take_the_place_of_the_bases(family: str, tmp_path: Path) -> None:
    base = tiny_model(family)
    saved = {
        f"{head}.{kind}": torch.randn_like(tensor, dtype=torch.float32) * tensor.std()
        for head in HEADS[family]
        for kind in ("weight", "bias")
        if (tensor := tiny_tensors(family)[f"{head}.{kind}"]) is not None
    }
    folder = write_peft(tmp_path, saved, config={"modules_to_save": HEADS[family]})
    adapter = read_adapter(folder, base)
    assert not adapter.alone
    expected = sample(load_tiny(merged_by_hand(family, saved)), family, (0, 1))
    together = sample(base, family, (0, 1, 1), [adapter, adapter, None])
    assert distance(together[:2], expected) <= 1e-4
    assert distance(together[2:], sample(base, family, (1,))) <= 1e-5


def test_a_tower_that_is_replaced_in_part_runs_in_a_network_of_its_own(tmp_path: Path) -> None:
    base = tiny_model("pi05")
    name = f"{EXPERT}1.mlp.down_proj"
    saved = {name + ".weight": 2 * tiny_tensors("pi05")[name + ".weight"].float()}
    factors = {**random_factors("pi05", EXPERT_ATTENTION), **saved}
    adapter = read_adapter(write_peft(tmp_path, factors, config={"modules_to_save": [name]}), base)
    assert adapter.alone
    together = sample(base, "pi05", (0, 1, 1), [adapter, None, adapter])
    expected = load_tiny(merged_by_hand("pi05", factors))
    assert distance(together[[0, 2]], sample(expected, "pi05", (0, 1))) <= 1e-4
    assert distance(together[[1]], sample(base, "pi05", (1,))) <= 1e-5


def test_the_prefix_runs_without_adapter_work_when_no_adapter_of_the_batch_touches_it(tmp_path: Path) -> None:
    base = tiny_model("pi05")
    expert = read_adapter(write_peft(tmp_path / "a", random_factors("pi05", EXPERT_ATTENTION)), base)
    prefix = read_adapter(write_peft(tmp_path / "b", random_factors("pi05", PREFIX)), base)
    resident = ResidentAdapters(base, lambda: (expert, prefix), 2**30)
    inputs = golden_inputs("pi05", (0, 1), 2)
    resident.groups([expert, prefix])
    _, with_expert = resident.apply(inputs, [expert, None], (2, 3))
    _, with_both = resident.apply(inputs, [expert, prefix], (2, 3))
    assert with_expert.change is not None
    assert with_both.change is not None
    assert not with_expert.change.language
    assert with_both.change.language


def test_adapters_that_do_not_fit_make_room_for_each_other(tmp_path: Path) -> None:
    base = tiny_model("pi05")
    adapters = [
        read_adapter(write_peft(tmp_path / str(i), random_factors("pi05", [*EXPERT_ATTENTION, *EYES], seed=i)), base)
        for i in range(3)
    ]
    resident = ResidentAdapters(base, lambda: tuple(adapters), memory_bytes=1)
    assert [len(group) for group in resident.groups([*adapters, None, adapters[0]])] == [3, 1, 1]
    assert resident.capacity == 1

    def run(adapter: Pi0Adapter) -> Tensor:
        network, inputs = resident.apply(golden_inputs("pi05", (1,), 2), [adapter], (3,))
        return network.sample_actions(inputs)

    first = [run(adapter) for adapter in adapters]
    again = [run(adapter) for adapter in adapters]
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert distance(first[0], first[1]) > 1e-3


def test_the_adapter_that_was_used_longest_ago_makes_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = tiny_model("pi05")
    adapters = [
        read_adapter(write_peft(tmp_path / str(i), random_factors("pi05", EXPERT_ATTENTION, seed=i)), base)
        for i in range(3)
    ]
    each = ChangeTables.bytes_per_slot(linear_shapes(base), [adapter.changes for adapter in adapters])
    resident = ResidentAdapters(base, lambda held=tuple(adapters): held, memory_bytes=2 * each)
    brought: list[int] = []
    write = ChangeTables.write
    monkeypatch.setattr(
        ChangeTables,
        "write",
        lambda tables, slot, changes: (
            brought.append(next(i for i, adapter in enumerate(adapters) if adapter.changes is changes)),
            write(tables, slot, changes),
        ),
    )
    for number in (0, 1, 0, 2, 0, 1):
        resident.apply(golden_inputs("pi05", (1,), 2), [adapters[number]], (3,))
    assert resident.capacity == 2
    assert brought == [0, 1, 2, 1]


def test_an_adapter_that_came_later_and_is_wider_is_served_with_those_before(tmp_path: Path) -> None:
    base = tiny_model("pi05")
    held = [read_adapter(write_peft(tmp_path / "a", random_factors("pi05", EXPERT_ATTENTION)), base)]
    resident = ResidentAdapters(base, lambda: tuple_of(held), 2**30)
    snapshots = [tuple(held)]

    def tuple_of(_: list[Pi0Adapter]) -> tuple[Pi0Adapter, ...]:
        return snapshots[-1]

    resident.groups([held[0]])
    factors = random_factors("pi05", PREFIX, rank=16)
    held.append(read_adapter(write_peft(tmp_path / "b", factors, config={"r": 16, "lora_alpha": 32}), base))
    snapshots.append(tuple(held))
    assert resident.groups(held) == [[0, 1]]
    network, inputs = resident.apply(golden_inputs("pi05", (0, 1), 4), held, (2, 3))
    expected = sample(load_tiny(merged_by_hand("pi05", factors)), "pi05", (1,))
    assert distance(network.sample_actions(inputs)[1:], expected) <= 1e-4


def test_groups_run_as_they_were_made_whatever_comes_meanwhile(tmp_path: Path) -> None:
    base = tiny_model("pi05")
    cases = [random_factors("pi05", EXPERT_ATTENTION, seed=seed) for seed in range(2)]
    first, second = (read_adapter(write_peft(tmp_path / str(i), case), base) for i, case in enumerate(cases))
    factors = random_factors("pi05", EXPERT_ATTENTION, rank=64)
    wide = read_adapter(write_peft(tmp_path / "wide", factors, config={"r": 64, "lora_alpha": 128}), base)
    each = ChangeTables.bytes_per_slot(linear_shapes(base), [first.changes])
    held = [(first, second), (wide,)]
    resident = ResidentAdapters(base, lambda: held[0], 2 * each)
    assert resident.groups([first, second]) == [[0, 1]]
    del held[0]  # tables that take the wide one have room for one adapter only
    network, inputs = resident.apply(golden_inputs("pi05", (0, 1), 4), [first, second], IMAGES)
    together = network.sample_actions(inputs)
    for number, case in enumerate(cases):
        alone = sample(load_tiny(merged_by_hand("pi05", case)), "pi05", (number,))
        assert distance(together[number], alone[0]) <= 1e-4
    assert resident.groups([first, second, wide]) == [[0], [1], [2]]


@pytest.mark.parametrize("name", ["expert", "wide"])
def test_an_adapter_that_peft_wrote_changes_the_weights_as_peft_merges_them(name: str) -> None:
    base = tiny_model("pi05")
    merged = base_tensors(with_changes(base, read_adapter(ADAPTERS / name, base).source))
    by_peft = load_file(ADAPTERS / name / "merged.safetensors")
    for tensor_name, tensor in merged.items():
        wanted = by_peft.pop(tensor_name, None)
        if wanted is None:
            assert torch.equal(tensor, base_tensors(base)[tensor_name]), tensor_name
        else:
            assert torch.allclose(tensor, wanted, rtol=1e-6, atol=1e-6), tensor_name
    assert not by_peft


@pytest.mark.parametrize("name", ["expert", "wide"])
def test_an_adapter_that_peft_wrote_acts_as_peft_merges_it(name: str) -> None:
    base = tiny_model("pi05")
    tensors = Tensors({n: t.float() for n, t in tiny_tensors("pi05").items()})
    tensors.update(load_file(ADAPTERS / name / "merged.safetensors"))
    adapter = read_adapter(ADAPTERS / name, base)
    assert distance(sample(base, "pi05", (0, 1), [adapter] * 2), sample(load_tiny(tensors), "pi05", (0, 1))) <= 1e-5


def test_an_adapter_of_another_network_is_refused_with_its_targets(tmp_path: Path) -> None:
    factors = random_factors("pi0", ["state_proj"])
    with pytest.raises(CheckpointError, match=r"unknown target: state_proj\.weight"):
        read_adapter(write_peft(tmp_path, factors), tiny_model("pi05"))


def test_an_adapter_of_other_widths_is_refused_with_both(tmp_path: Path) -> None:
    name = f"{EXPERT}0.self_attn.q_proj"
    factors = {f"{name}.lora_A.weight": torch.ones(4, 31), f"{name}.lora_B.weight": torch.ones(128, 4)}
    with pytest.raises(CheckpointError, match=r"wrong shape: .*q_proj\.weight is \(128, 32\).* expect \(128, 31\)"):
        read_adapter(write_peft(tmp_path, factors), tiny_model("pi05"))


def test_an_adapter_of_only_zeros_says_so(tmp_path: Path) -> None:
    factors = random_factors("pi05", EXPERT_ATTENTION)
    zeros = {name: torch.zeros_like(t) if "lora_B" in name else t for name, t in factors.items()}
    adapter = read_adapter(write_peft(tmp_path / "zero", zeros), tiny_model("pi05"))
    assert adapter.notes == ("has no effect: all its changes are zero",)
    assert not read_adapter(write_peft(tmp_path / "real", factors), tiny_model("pi05")).notes


def test_a_change_of_what_actions_do_not_depend_on_is_noted(tmp_path: Path) -> None:
    head = "paligemma_with_expert.gemma_expert.lm_head"
    factors = random_factors("pi05", EXPERT_ATTENTION)
    factors |= {f"{head}.lora_A.weight": torch.ones(4, 3), f"{head}.lora_B.weight": torch.ones(3, 4)}
    adapter = read_adapter(write_peft(tmp_path, factors), tiny_model("pi05"))
    assert adapter.notes == (f"changes {head}.weight, which actions do not depend on",)


def test_a_folder_that_holds_no_adapter_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no adapter in .*: expected adapter_config\.json"):
        read_adapter(tmp_path, tiny_model("pi05"))
    with pytest.raises(CheckpointError, match="is not a folder"):
        read_adapter(tmp_path / "nowhere", tiny_model("pi05"))


def test_base_tensors_are_the_checkpoints() -> None:
    tensors = base_tensors(tiny_model("pi0"))
    stored = tiny_tensors("pi0")
    assert all(np.array_equal(tensor, stored[name].float()) for name, tensor in tensors.items())
