"""Rows as the network's inputs: where tokens stand, and how an image becomes patches."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny_groot import IMAGE, VISION_END, VISION_START, drawn_noise, drawn_row, tiny_config, tiny_model

from relay.models.groot.assemble import assemble, token_positions
from relay.models.groot.language import interleaved_axes
from relay.models.groot.shapes import Shape


def test_text_counts_on_behind_the_longer_side_of_an_image() -> None:
    row = drawn_row(1, [(2, 3), (2, 2)], 1)
    assert row.tokens.tolist()[3:5] == [VISION_START, IMAGE]
    time, height, width = token_positions(row, tiny_config()).T.tolist()
    text = [0, 1, 2, 3]
    assert time == [*text, *[4] * 6, 7, 8, *[9] * 4, 11, 12, 13, 14]
    assert height == [*text, 4, 4, 4, 5, 5, 5, 7, 8, 9, 9, 10, 10, 11, 12, 13, 14]
    assert width == [*text, 4, 5, 6, 4, 5, 6, 7, 8, 9, 10, 9, 10, 11, 12, 13, 14]


def test_frequencies_take_turns_and_the_rest_is_time() -> None:
    axes = interleaved_axes((24, 20, 20))
    assert [i for i, axis in enumerate(axes) if axis == 1] == list(range(1, 59, 3))
    assert [i for i, axis in enumerate(axes) if axis == 2] == list(range(2, 60, 3))
    assert len(axes) == 64


def test_patches_of_one_token_are_neighbours_and_channels_come_first() -> None:
    row = drawn_row(1, [(2, 3)], 1)
    patches = assemble(tiny_model(), [row], drawn_noise(1), 1).patches
    image = row.images[0]
    assert patches.shape == (1, 24, 768)
    for patch, (y, x) in {0: (0, 0), 1: (0, 16), 2: (16, 0), 3: (16, 16), 4: (0, 32), 12: (32, 0)}.items():
        expected = image[y : y + 16, x : x + 16].transpose(2, 0, 1).reshape(-1)
        assert np.array_equal(patches[0, patch].numpy(), expected), patch


def test_pixels_reach_the_tower_between_minus_one_and_one() -> None:
    model = tiny_model()
    inputs = assemble(model, [drawn_row(1, [(2, 2)], 1)], drawn_noise(1), 1)
    scaled = inputs.patches.float() / 127.5 - 1
    with torch.inference_mode():
        assert torch.allclose(
            model.vision(inputs.patches, inputs.grids).tokens, model.vision(scaled, inputs.grids).tokens
        )


@pytest.mark.parametrize("count", [3, 5])
def test_image_tokens_that_are_not_those_of_the_images_are_refused(count: int) -> None:
    row = drawn_row(1, [(2, 2)], 1)
    tokens = np.array([1, *[IMAGE] * count, VISION_END])
    with pytest.raises(ValueError, match=rf"{count} image tokens, expected 4 for 1 images of 2x2 tokens"):
        token_positions(replace(row, tokens=tokens), tiny_config())


def test_image_tokens_that_are_interrupted_are_refused() -> None:
    row = drawn_row(1, [(2, 2)], 1)
    tokens = np.array([1, IMAGE, IMAGE, VISION_END, IMAGE, IMAGE])
    with pytest.raises(ValueError, match=r"2x2 tokens is interrupted in the prompt, at token 1"):
        token_positions(replace(row, tokens=tokens), tiny_config())


def test_an_image_that_was_not_resized_is_refused() -> None:
    row = replace(drawn_row(1, [(2, 2)], 1), images=(np.zeros((64, 50, 3), np.uint8),))
    with pytest.raises(ValueError, match=r"an image is 64x50, expected sides that are multiples of 32"):
        assemble(tiny_model(), [row], drawn_noise(1), 1)


def test_lengths_are_told_only_where_something_is_padded() -> None:
    model, noise = tiny_model(), torch.zeros(2, 1, 1)
    alike = [drawn_row(seed, [(2, 2)], 3) for seed in (1, 2)]
    plain, padded = assemble(model, alike, noise, 1), assemble(model, alike, noise, 1, Shape(16, 8, 2))
    assert plain.lengths is plain.text.lengths is plain.images.lengths is padded.lengths is None
    assert padded.text.lengths is not None
    assert padded.images.lengths is not None
    assert padded.text.lengths.tolist() == [10, 10]
    assert padded.images.lengths.tolist() == [4, 4]
    other = assemble(model, [alike[0], drawn_row(3, [(2, 2)], 4)], noise, 1)
    assert other.lengths is not None
    assert other.lengths.tolist() == [14, 15]
    assert other.images.lengths is None
