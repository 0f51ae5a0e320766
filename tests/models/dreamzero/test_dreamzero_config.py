"""What `config.json` says of a network, read entry by entry."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tiny_dreamzero import ENCODERS, config_json

from relay.engine.weights import CheckpointError
from relay.models.dreamzero.config import read_config

Change = Callable[[dict[str, Any], dict[str, Any]], object]
"""Of the maps of the action head and of the transformer."""

HEAD = "config.json: action_head_cfg.config"
DIT = f"{HEAD}.diffusion_model_cfg"

REFUSED: list[tuple[Change, str]] = [
    (lambda head, dit: dit.pop("dim"), f"{DIT}: dim is missing, expected an integer from 1 to 1,048,576"),
    (lambda head, dit: dit.update(dim=-96), f"{DIT}: dim is -96, expected an integer from 1 to 1,048,576"),
    (lambda head, dit: dit.update(dim="96"), f"{DIT}: dim is '96', expected an integer"),
    (
        lambda head, dit: dit.update(num_layers=10**6),
        f"{DIT}: num_layers is 1000000, expected an integer from 1 to 1,024",
    ),
    (
        lambda head, dit: dit.update(num_layer=dit.pop("num_layers")),
        f"{DIT}: num_layers is missing (there is 'num_layer')",
    ),
    (
        lambda head, dit: dit.update(num_heads=7),
        f"{DIT}: num_heads is 7, expected a divisor of dim, 96, with an even width for each head",
    ),
    (lambda head, dit: dit.update(freq_dim=33), f"{DIT}: freq_dim is 33, expected an even number"),
    (lambda head, dit: dit.update(eps=-1e-6), f"{DIT}: eps is -1e-06, expected a number from 1e-12 to 0.1"),
    (
        lambda head, dit: dit.update(model_type="i2w"),
        f"{DIT}: model_type is 'i2w', expected 'i2v' or 'ti2v', did you mean",
    ),
    (lambda head, dit: dit.update(in_dim=16), f"{DIT}: in_dim is 16; this engine runs networks in which it is 36"),
    (
        lambda head, dit: (dit.update(num_frame_per_block=1), head.update(num_frame_per_block=1)),
        f"{DIT}: num_frame_per_block is 1; this engine runs networks in which it is 2",
    ),
    (lambda head, dit: head.update(num_frames=32), f"{HEAD}: num_frames is 32, expected 5, 9, 13 and so on"),
    (
        lambda head, dit: head["vae_cfg"].update(_target_="x.WanVideoVAE83"),
        f"{HEAD}.vae_cfg: _target_ is 'WanVideoVAE83', expected 'WanVideoVAE' or 'WanVideoVAE38', did you mean",
    ),
    (lambda head, dit: head.update(vae_cfg=3), f"{HEAD}: vae_cfg is 3, expected an object"),
    (
        lambda head, dit: head.update(target_video_height=64),
        f"{HEAD}: target_video_width is missing, expected an integer",
    ),
    (
        lambda head, dit: head.update(video_inference_final_noise=1.5),
        f"{HEAD}: video_inference_final_noise is 1.5, expected a number from 0 to 1",
    ),
]


@pytest.mark.parametrize(("change", "told"), REFUSED)
def test_what_cannot_be_is_refused_by_file_and_entry(change: Change, told: str) -> None:
    config = config_json()
    head = config["action_head_cfg"]["config"]
    change(head, head["diffusion_model_cfg"])
    with pytest.raises(CheckpointError) as error:
        read_config(config, ENCODERS)
    assert str(error.value).startswith(told)


@pytest.mark.parametrize(
    ("encoders", "told"),
    [
        ({"txt": {}}, "relay.json: encoders: unknown key 'txt', did you mean 'text'?; known are text, image, video"),
        ({"text": {"widht": 64}}, "relay.json: encoders.text: unknown key 'widht', did you mean 'width'?; known are"),
        ({"video": {"version": "2.2"}}, "relay.json: encoders.video: unknown key 'version'; known are base"),
        ({"text": {"heads": 0}}, "relay.json: encoders.text: heads is 0, expected an integer from 1"),
        ({"image": {"heads": 7}}, "relay.json: encoders.image: heads is 7, expected a divisor of width, 1280"),
        ({"image": {"image_size": 8}}, "relay.json: encoders.image: image_size is 8, less than one patch of 14"),
        ({"image": 3}, "relay.json: encoders: image is 3, expected an object"),
    ],
)
def test_sizes_of_encoders_that_cannot_be_are_refused(encoders: dict[str, Any], told: str) -> None:
    with pytest.raises(CheckpointError) as error:
        read_config(config_json(), {**ENCODERS, **encoders})
    assert str(error.value).startswith(told)
