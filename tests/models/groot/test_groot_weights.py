"""Checkpoint tensors to the network: every tensor in its place, and nothing is loaded by halves."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tiny_groot import (
    PATCH_WEIGHT,
    TinyTensors,
    described,
    drawn_noise,
    drawn_row,
    golden_tensor,
    load_tiny,
    tiny_config,
    tiny_model,
    tiny_tensors,
    two_frame_model,
)

from relay.engine.weights import CheckpointError
from relay.models.groot.assemble import assemble
from relay.models.groot.config import RELEASED, read_config
from relay.models.groot.model import Groot
from relay.models.groot.weights import UNUSED, checkpoint_shapes, ignored_names, load_weights, packing

VISUAL = "backbone.model.model.visual."
HEAD = "action_head."


def sample(model: Groot) -> np.ndarray[Any, Any]:
    row = drawn_row(1, [(2, 2), (2, 3)], 3)
    return model.sample_actions(assemble(model, [row], drawn_noise(1), 4)).numpy()


def test_every_tensor_of_a_checkpoint_is_in_the_network_where_it_belongs() -> None:
    model = tiny_model()
    for part in packing(model):
        taken = part.take(golden_tensor(part.name, part.shape))
        assert len(taken) == len(part.places), part.name
        for value, place in zip(taken, part.places, strict=True):
            assert torch.equal(place, value.expand(place.shape)), part.name


def test_every_parameter_is_filled_from_the_checkpoint() -> None:
    model = load_tiny(tiny_tensors())
    for part in packing(model):
        for place in part.places:
            place.fill_(float("nan"))
    for name, parameter in model.named_parameters():
        assert parameter.isnan().all(), name


def test_no_parameter_keeps_more_memory_than_it_needs() -> None:
    for name, parameter in tiny_model().named_parameters():
        assert parameter.untyped_storage().nbytes() == parameter.numel() * parameter.element_size(), name


def test_the_released_model_has_the_published_number_of_tensors_and_parameters() -> None:
    shapes = checkpoint_shapes(read_config(RELEASED))
    assert len(shapes) + len(UNUSED) == 1031
    unused_norm = read_config(RELEASED).text.width
    assert sum(torch.Size(shape).numel() for shape in shapes.values()) + unused_norm == 3_144_016_000


def test_a_fine_tune_of_lerobots_loads_alike() -> None:
    tensors = tiny_tensors()
    renamed = TinyTensors({}, {f"_groot_model.{name}": tensors.read(name) for name in tensors})
    assert np.array_equal(sample(load_tiny(renamed)), sample(tiny_model()))


def test_only_the_served_embodiments_maps_are_kept() -> None:
    model = load_tiny(tiny_tensors(), slots=[2])
    assert model.slots == [2]
    assert np.array_equal(sample(model), sample(tiny_model()))
    assert all(parameter.is_contiguous() for parameter in model.maps.parameters())


def test_a_slot_that_the_checkpoint_does_not_have_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"no slot 4 of 0 to 3, max_num_embodiments"):
        load_tiny(tiny_tensors(), slots=[2, 4])


@torch.inference_mode()
def test_summed_patch_weights_do_what_two_equal_frames_do() -> None:
    inputs = assemble(tiny_model(), [drawn_row(1, [(2, 2)], 1)], drawn_noise(1), 1)
    frame = (inputs.patches.float() / 127.5 - 1).view(1, 16, 3, 1, 256)
    both = two_frame_model().vision(frame.expand(1, 16, 3, 2, 256).flatten(2), inputs.grids)
    assert torch.allclose(tiny_model().vision(inputs.patches, inputs.grids).tokens, both.tokens, atol=1e-5)


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float64])
def test_weights_of_every_stored_dtype_are_taken(stored: torch.dtype) -> None:
    tensors = tiny_tensors()
    cast = TinyTensors({}, {name: tensors.read(name).to(stored) for name in tensors})
    bias = tiny_model().dit.out.bias
    assert bias is not None
    assert torch.equal(load_tiny(cast).dit.out.bias, bias.to(stored).float())  # pyright: ignore[reportArgumentType]


class Unreadable(TinyTensors):
    """Tensors that must not be read."""

    def read(self, name: str) -> torch.Tensor:
        raise AssertionError(name)


def test_a_missing_an_unknown_and_a_misshapen_tensor_are_all_named_before_anything_is_read() -> None:
    tensors = Unreadable(described()["tensors"])
    del tensors[VISUAL + "blocks.2.norm1.bias"]
    tensors[HEAD + "model.transformer_blocks.9.attn1.to_q.weight"] = (32, 32)
    tensors[HEAD + "vlln.weight"] = (65,)
    with pytest.raises(CheckpointError) as caught:
        load_tiny(tensors)
    text = str(caught.value)
    assert "missing: backbone.model.model.visual.blocks.2.norm1.bias" in text
    assert "unknown: action_head.model.transformer_blocks.9.attn1.to_q.weight" in text
    assert "wrong shape: action_head.vlln.weight is (65,), expected (64,)" in text
    assert len(text.splitlines()) == 4


def test_the_tensors_that_nothing_uses_are_known_and_not_needed() -> None:
    tensors = Unreadable({name: (2,) for name in UNUSED})
    assert ignored_names([*tensors, PATCH_WEIGHT]) == list(UNUSED)
    whole = tiny_tensors()
    dead = TinyTensors(described()["tensors"] | dict(tensors))
    assert set(load_tiny(dead).state_dict()) == set(load_tiny(whole).state_dict())


def test_lora_tensors_are_refused_by_name_with_the_remedy() -> None:
    tensors = tiny_tensors()
    tensors[HEAD + "model.transformer_blocks.0.attn1.to_q.lora_A.weight"] = (1, 32)
    with pytest.raises(CheckpointError, match=r"adapter: \S+to_q\.lora_A\.weight and 0 more .* --adapter NAME=DIR"):
        load_tiny(tensors)


def test_a_tensor_under_both_names_is_refused() -> None:
    tensors = tiny_tensors()
    tensors["_groot_model." + PATCH_WEIGHT] = tensors[PATCH_WEIGHT]
    with pytest.raises(CheckpointError, match=r"proj\.weight twice, once as _groot_model\."):
        load_tiny(tensors)


def test_whole_numbers_are_refused_by_name() -> None:
    tensors = tiny_tensors()
    tensors.made[HEAD + "vlln.bias"] = torch.zeros(64, dtype=torch.int8)
    with pytest.raises(CheckpointError, match=r"vlln\.bias holds torch\.int8, expected floating-point"):
        load_tiny(tensors)


def test_progress_grows_to_one() -> None:
    shares: list[float] = []
    load_weights(
        tiny_config(),
        tiny_tensors(),
        torch.device("cpu"),
        torch.float32,
        lambda phase, share: shares.append(share),
    )
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
