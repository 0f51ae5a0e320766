"""LoRA adapters, beside the weights and in them: both equal the checkpoint with changes worked out by the formula."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from lora import write_peft
from tiny_groot import TinyTensors, described, drawn_noise, drawn_row, load_tiny, tiny_model, tiny_tensors
from torch import Tensor

from relay.engine.adapter_rows import Changes, ChangeTables
from relay.engine.weights import CheckpointError
from relay.models.groot.adapters import GrootAdapter, read_adapter, with_changes
from relay.models.groot.assemble import assemble
from relay.models.groot.changes import linear_shapes
from relay.models.groot.inputs import GrootRow
from relay.models.groot.model import Groot
from relay.models.groot.resident import ResidentAdapters

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


def random_factors(modules: Sequence[str], *, rank: int = 4, seed: int = 0) -> dict[str, Tensor]:
    """`lora_A` and `lora_B` of these linear layers, large enough to matter."""
    generator, tensors = torch.Generator().manual_seed(seed), dict[str, Tensor]()
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


def write(folder: Path, tensors: Mapping[str, Tensor], *, prefix: str = "base_model.model.", rank: int = 4) -> Path:
    saved = sorted({name.rpartition(".")[0] for name in tensors if ".lora_" not in name})
    config = {"modules_to_save": saved, "r": rank, "lora_alpha": 2 * rank}
    return write_peft(folder, tensors, prefix=prefix, config=config)


def drawn_rows(count: int) -> list[GrootRow]:
    """Observations with one to three images of different sizes, and prompts of different lengths."""
    return [drawn_row(seed, [(2, 3), (2, 2), (3, 2)][: 1 + seed % 3], 2 + seed) for seed in range(count)]


def sample(model: Groot, row: GrootRow | None = None, seed: int = 1) -> Tensor:
    row = row or drawn_row(1, [(2, 3), (2, 2)], 4)
    return model.sample_actions(assemble(model, [row], drawn_noise(seed), 4))


def sample_beside(
    resident: ResidentAdapters,
    adapters: Sequence[GrootAdapter | None],
    rows: Sequence[GrootRow] | None = None,
    num_steps: int = 4,
) -> Tensor:
    """One batch of rows with an adapter each, of which the noise is that of `sample` with the row's number."""
    rows = rows or [drawn_row(1, [(2, 3), (2, 2)], 4)]
    noise = drawn_noise(*([1] if len(rows) == 1 else range(len(rows))))
    assert len(resident.groups(adapters)) == 1
    inputs = assemble(tiny_model(), rows, noise, num_steps)
    network, inputs = resident.apply(inputs, adapters, [len(row.images) for row in rows])
    return network.sample_actions(inputs)


def resident_of(*adapters: GrootAdapter, memory_bytes: int = 2**30) -> ResidentAdapters:
    return ResidentAdapters(tiny_model(), lambda: adapters, memory_bytes)


def distance(ours: Tensor, reference: Tensor) -> float:
    return float((ours - reference).abs().max() / reference.std())


@pytest.mark.parametrize("kind", list(TARGETS))
def test_an_adapter_beside_the_weights_acts_like_one_in_them(kind: str, tmp_path: Path) -> None:
    tensors = random_factors(TARGETS[kind])
    base = tiny_model()
    adapter = read_adapter(write(tmp_path, tensors), base)
    ours = sample_beside(resident_of(adapter), [adapter])
    assert distance(ours, sample(merged_by_hand(tensors))) <= 1e-5
    assert distance(ours, sample(base)) > 1e-4


def test_eight_rows_with_three_adapters_and_none_equal_their_own_runs(tmp_path: Path) -> None:
    base, rows = tiny_model(), drawn_rows(8)
    everything = [module for modules in TARGETS.values() for module in modules]
    cases = [
        random_factors([m for kind in ("self-attention", "MLPs", "language") for m in TARGETS[kind]], seed=1),
        random_factors([*everything, f"{BLOCK}7.attn1.to_k"], rank=6, seed=2),
        random_factors([*TARGETS["norms of the time"], *TARGETS["vision"]], rank=2, seed=3),
    ]
    adapters = [
        read_adapter(write(tmp_path / str(number), tensors, rank=rank), base)
        for number, (tensors, rank) in enumerate(zip(cases, (4, 6, 2), strict=True))
    ]
    merged = [*map(merged_by_hand, cases), base]
    order = [0, 3, 1, 2, 1, 3, 0, 2]  # 3 is none
    together = sample_beside(resident_of(*adapters), [[*adapters, None][one] for one in order], rows)
    for number, one in enumerate(order):
        alone = sample(merged[one], rows[number], number)
        assert distance(together[number], alone[0]) <= 1e-5
        assert one == 3 or distance(together[number], sample(base, rows[number], number)[0]) > 1e-4


def test_rows_of_the_base_alone_are_bit_equal_to_a_network_without_adapters(tmp_path: Path) -> None:
    base, rows = tiny_model(), drawn_rows(2)
    adapter = read_adapter(write(tmp_path, random_factors([m for kind in TARGETS.values() for m in kind])), base)
    before, resident = sample(base, rows[1], 1), resident_of(adapter)
    sample_beside(resident, [adapter, None], rows)
    assert torch.equal(sample_beside(resident, [None], rows[1:]), before)


def test_the_observation_is_seen_without_adapter_work_when_no_adapter_of_the_batch_touches_that(tmp_path: Path) -> None:
    base, rows = tiny_model(), drawn_rows(2)
    actions = read_adapter(write(tmp_path / "a", random_factors(TARGETS["MLPs"])), base)
    seeing = read_adapter(write(tmp_path / "b", random_factors(TARGETS["vision"] + TARGETS["language"])), base)
    resident, inputs = resident_of(actions, seeing), assemble(base, rows, drawn_noise(0, 1), 2)
    images = [len(row.images) for row in rows]
    resident.groups([actions, seeing])
    _, of_actions = resident.apply(inputs, [actions, None], images)
    _, of_both = resident.apply(inputs, [actions, seeing], images)
    assert of_actions.change is not None
    assert of_both.change is not None
    assert not of_actions.change.vision.blocks
    assert not of_actions.change.language
    assert not of_actions.change.dit.keys
    assert of_both.change.vision.blocks
    assert of_both.change.language


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


def test_rows_of_an_adapter_with_whole_tensors_run_apart(tmp_path: Path) -> None:
    base, rows = tiny_model(), drawn_rows(4)
    factors, whole = random_factors(TARGETS["MLPs"]), random_tensors(SAVED[:1])
    beside = read_adapter(write(tmp_path / "a", factors), base)
    alone = read_adapter(write(tmp_path / "b", factors | whole), base)
    assert (beside.alone, alone.alone) == (False, True)
    resident = resident_of(beside, alone)
    assert resident.groups([alone, None, alone, beside]) == [[1, 3], [0, 2]]
    together = sample_beside(resident, [alone, alone], rows[:2])
    merged = merged_by_hand(factors | whole)
    for number in range(2):
        assert distance(together[number], sample(merged, rows[number], number)[0]) <= 1e-5


def test_adapters_that_do_not_fit_make_room_for_each_other(tmp_path: Path) -> None:
    base, rows = tiny_model(), drawn_rows(1)
    adapters = [
        read_adapter(write(tmp_path / str(seed), random_factors(TARGETS["MLPs"], seed=seed)), base) for seed in range(3)
    ]
    resident = resident_of(*adapters, memory_bytes=1)
    assert [len(group) for group in resident.groups([*adapters, None, adapters[0]])] == [3, 1, 1]
    first = [sample_beside(resident, [adapter], rows) for adapter in adapters]
    again = [sample_beside(resident, [adapter], rows) for adapter in adapters]
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert distance(first[0], first[1]) > 1e-3


def test_the_adapter_that_was_used_longest_ago_makes_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = tiny_model()
    adapters = [
        read_adapter(write(tmp_path / str(seed), random_factors(TARGETS["MLPs"], seed=seed)), base) for seed in range(3)
    ]
    each = ChangeTables.bytes_per_slot(linear_shapes(base), [adapter.rows for adapter in adapters])
    resident = resident_of(*adapters, memory_bytes=3 * each)  # a slot is for rows without an adapter
    brought: list[int] = []
    write_slot = ChangeTables.write

    def noting(tables: ChangeTables, slot: int, changes: Changes) -> None:
        brought.extend(i for i, adapter in enumerate(adapters) if adapter.rows is changes)
        write_slot(tables, slot, changes)

    monkeypatch.setattr(ChangeTables, "write", noting)
    for number in (0, 1, 0, 2, 0, 1):
        sample_beside(resident, [adapters[number]], num_steps=1)
    assert resident.capacity == 2
    assert brought == [0, 1, 2, 1]


def test_an_adapter_that_came_later_and_is_wider_is_served_with_those_before(tmp_path: Path) -> None:
    base, rows = tiny_model(), drawn_rows(2)
    first = read_adapter(write(tmp_path / "a", random_factors(TARGETS["MLPs"])), base)
    tensors = random_factors(TARGETS["MLPs"] + TARGETS["features"], rank=16, seed=1)
    second = read_adapter(write(tmp_path / "b", tensors, rank=16), base)
    held = [(first,), (first, second)]
    resident = ResidentAdapters(base, lambda: held[0], 2**30)
    sample_beside(resident, [first], rows[:1])
    del held[0]
    together = sample_beside(resident, [first, second], rows)
    assert distance(together[1], sample(merged_by_hand(tensors), rows[1], 1)[0]) <= 1e-5


def test_groups_run_as_they_were_made_whatever_comes_meanwhile(tmp_path: Path) -> None:
    base, rows = tiny_model(), drawn_rows(2)
    cases = [random_factors(TARGETS["MLPs"], seed=seed) for seed in range(2)]
    first, second = (read_adapter(write(tmp_path / str(i), case), base) for i, case in enumerate(cases))
    wide = read_adapter(write(tmp_path / "wide", random_factors(TARGETS["MLPs"], rank=64), rank=64), base)
    each = ChangeTables.bytes_per_slot(linear_shapes(base), [first.rows])
    held = [(first, second), (wide,)]
    resident = ResidentAdapters(base, lambda: held[0], 3 * each)
    assert resident.groups([first, second]) == [[0, 1]]
    del held[0]  # tables that take the wide one have room for one adapter only
    inputs = assemble(base, rows, drawn_noise(0, 1), 4)
    network, inputs = resident.apply(inputs, [first, second], [len(row.images) for row in rows])
    together = network.sample_actions(inputs)
    for number, case in enumerate(cases):
        assert distance(together[number], sample(merged_by_hand(case), rows[number], number)[0]) <= 1e-5
    assert resident.groups([first, second, wide]) == [[0], [1], [2]]


def test_what_was_forgotten_comes_back(tmp_path: Path) -> None:
    adapter = read_adapter(write(tmp_path, random_factors(TARGETS["MLPs"] + TARGETS["the time itself"])), tiny_model())
    resident = resident_of(adapter)
    before = sample_beside(resident, [adapter])
    resident.forget()
    assert torch.equal(sample_beside(resident, [adapter]), before)


def test_tables_that_found_no_memory_are_made_at_the_next_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = read_adapter(write(tmp_path, random_factors(TARGETS["MLPs"])), tiny_model())
    resident, expected = resident_of(adapter), sample_beside(resident_of(adapter), [adapter])

    def full(*_: object) -> None:
        raise torch.cuda.OutOfMemoryError

    with monkeypatch.context() as patched:
        patched.setattr(ChangeTables, "__init__", full)
        with pytest.raises(torch.cuda.OutOfMemoryError):
            resident.groups([adapter])
    assert torch.equal(sample_beside(resident, [adapter]), expected)


def test_the_network_used_longest_ago_makes_room(tmp_path: Path) -> None:
    base = tiny_model()
    alone = [
        read_adapter(write(tmp_path / str(i), random_tensors([f"{BLOCK}{i}.attn1.to_out.0.weight"])), base)
        for i in range(3)
    ]
    row = assemble(base, [drawn_row(1, [(2, 2)], 2)], drawn_noise(1), 1)
    resident = resident_of(*alone, memory_bytes=2 * 32 * 32 * 4)

    def network(adapter: GrootAdapter | None) -> Groot:
        resident.groups([adapter])
        return resident.apply(row, [adapter], [1])[0]

    networks = [network(adapter) for adapter in alone[:2]]
    assert network(None) is base
    assert network(alone[0]) is networks[0]
    network(alone[2])
    assert network(alone[0]) is networks[0]
    assert network(alone[1]) is not networks[1]


def test_schedules_of_adapters_do_not_pile_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relay.models.groot.resident.TABULATED_STEPS", 5)
    adapter = read_adapter(write(tmp_path, random_factors(TARGETS["the time itself"])), tiny_model())
    resident = resident_of(adapter)
    for num_steps in (2, 3, 4):
        sample_beside(resident, [adapter], num_steps=num_steps)
    assert list(resident._schedules) == [(adapter, 4, 2)]
