"""Device memory at the released sizes, as it was published, and a device that is too small."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from tiny_dreamzero import ENCODERS, config_json

from relay.engine.weights import CheckpointError
from relay.models.dreamzero.config import DreamZeroConfig, read_config
from relay.models.dreamzero.footprint import Footprint, check_room, footprint, free_memory

pytestmark = pytest.mark.dreamzero

RELEASED = {
    "14B": {
        "model_type": "i2v",
        "dim": 5120,
        "in_dim": 36,
        "ffn_dim": 13_824,
        "out_dim": 16,
        "num_heads": 40,
        "num_layers": 40,
        "frame_seqlen": 880,
    },
    "5B": {
        "model_type": "ti2v",
        "concat_first_frame_latent": False,
        "dim": 3072,
        "in_dim": 48,
        "ffn_dim": 14_336,
        "out_dim": 48,
        "num_heads": 24,
        "num_layers": 30,
        "frame_seqlen": 50,
    },
}


@cache
def released(size: str) -> DreamZeroConfig:
    content = config_json()
    head = content["action_head_cfg"]["config"]
    head["diffusion_model_cfg"].update({"freq_dim": 256, **RELEASED[size]})
    if size == "5B":
        head["vae_cfg"]["_target_"] = "groot.vla.model.dreamzero.modules.wan_video_vae.WanVideoVAE38"
        head.update(target_video_height=160, target_video_width=320)
    return read_config(content)


@cache
def needed(size: str, dtype: torch.dtype = torch.bfloat16) -> Footprint:
    return footprint(released(size), dtype)


@pytest.mark.parametrize(
    ("size", "part", "gigabytes"),
    [
        ("14B", "transformer", 32.9),
        ("14B", "text encoder", 11.4),
        ("14B", "image encoder", 1.2),
        ("14B", "video encoder", 0.107),
        ("5B", "transformer", 11.2),
        ("5B", "image encoder", 1.2),
        ("5B", "video encoder", 0.3),
    ],
)
def test_each_parts_weights_have_their_published_size(size: str, part: str, gigabytes: float) -> None:
    assert needed(size).weights[part] == pytest.approx(gigabytes * 1e9, rel=0.05)


def test_the_whole_14b_network_takes_45_6_gb_and_a_session_14_3() -> None:
    assert needed("14B").network == pytest.approx(45.6e9, rel=0.05)
    assert needed("14B").session == pytest.approx(14.3e9, rel=0.05)
    assert needed("14B").memory == pytest.approx(13.0e9, rel=0.05)
    assert needed("14B").cross == pytest.approx(1.26e9, rel=0.05)


def test_a_session_of_the_5b_network_takes_0_35_and_0_56_gb() -> None:
    assert needed("5B").memory == pytest.approx(0.35e9, rel=0.05)
    assert needed("5B").cross == pytest.approx(0.56e9, rel=0.05)


def test_working_memory_is_the_published_gigabyte_or_two() -> None:
    assert 1e9 <= needed("14B").work <= 2e9
    assert needed("5B").work < needed("14B").work


def test_float32_takes_twice_as_much() -> None:
    assert needed("14B", torch.float32).least == 2 * needed("14B").least


def test_a_session_is_counted_as_the_network_makes_it() -> None:
    from tiny_dreamzero_model import session_before

    keys = session_before("base", 1).keys
    assert keys is not None
    counted = footprint(read_config(config_json(), ENCODERS), torch.float32)
    assert keys.nbytes == counted.session


def test_a_device_that_cannot_hold_it_is_refused_with_what_is_needed() -> None:
    with pytest.raises(CheckpointError) as error:
        check_room(needed("14B"), 48_000_000_000, "cuda:0")
    assert str(error.value) == (
        "dreamzero needs 61.3 GB on cuda:0, of which 48.0 GB are free: 45.7 GB for the weights, 14.3 GB for one "
        "session, about 1.4 GB to work in; take a larger device, or one that nothing else runs on"
    )


@pytest.mark.parametrize("free", [80_000_000_000, None])
def test_a_device_that_can_or_that_does_not_tell_is_taken(free: int | None) -> None:
    check_room(needed("14B"), free, "cuda:0")


def test_this_machines_free_memory_is_known_or_said_not_to_be() -> None:
    free = free_memory(torch.device("cpu"))
    assert free is None or free > 1_000_000
    assert free_memory(torch.device("meta")) is None
