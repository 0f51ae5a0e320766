"""One observation in every form that clients send, and the recipes of the robots that it is of."""

from __future__ import annotations

from typing import Any

import numpy as np
from groot_folders import DROID, IDS, LIBERO, WIDTHS, observation, processor_kwargs, statistics_of
from numpy.typing import NDArray

from relay.models.groot.recipe import Recipe, read_recipe
from relay.protocol.images import Codec, encode_frame

LANGUAGE = "annotation.language.language_instruction"
EXTERIOR, WRIST = "exterior_image_1_left", "wrist_image_left"


def recipe_of(tag: str) -> Recipe:
    sizes = {key: WIDTHS[key] for key in ("max_state_dim", "max_action_dim", "action_horizon")}
    return read_recipe(processor_kwargs([tag]), {tag: statistics_of(tag)}, IDS, tag, **sizes)


RECIPES = {tag: recipe_of(tag) for tag in (DROID, LIBERO)}
FORMS = ("nested", "without axes", "flat", "flat without axes", "vllm", "lerobot", "one vector", "encoded", "lists")


def in_form(form: str, tag: str) -> dict[str, Any]:
    """The same observation in another form."""
    nested = observation(tag)
    video = {camera: frames[0] for camera, frames in nested["video"].items()}  # (T, H, W, 3)
    bare = {camera: frames if len(frames) > 1 else frames[0] for camera, frames in video.items()}
    state = {key: values[0, 0] for key, values in nested["state"].items()}
    lists = {key: [float(value) for value in values] for key, values in state.items()}
    text = nested["language"][RECIPES[tag].language_key]
    flat = {f"video.{key}": value for key, value in nested["video"].items()}
    flat |= {f"state.{key}": value for key, value in nested["state"].items()}
    bare_flat = {f"video.{key}": value for key, value in bare.items()}
    bare_flat |= {f"state.{key}": value for key, value in state.items()}
    files = {camera: [encode_frame(one, Codec.LOSSLESS) for one in frames] for camera, frames in video.items()}
    return {
        "nested": nested,
        "without axes": {"video": bare, "state": state, "language": {RECIPES[tag].language_key: text[0][0]}},
        "flat": {**flat, RECIPES[tag].language_key: text[0]},
        "flat without axes": {**bare_flat, "prompt": text[0][0].encode()},
        "vllm": {"images": nested["video"], "state": nested["state"], "prompt": text[0][0]},
        "lerobot": {
            "embodiment": tag,
            "modality_config": {"state": {}},
            "images": list(bare.values()),
            "state": lists,
            "prompt": text[0][0],
        },
        "one vector": {"video": bare, "state": np.concatenate(list(state.values())), "prompt": text[0]},
        "encoded": {"video": files, "state": {**state, **doubles(state)}, "language": text[0][0]},
        "lists": {
            "video": {camera: list(frames) for camera, frames in video.items()},
            "state": {key: values if len(values) > 1 else values[0] for key, values in lists.items()},
            "prompt": text,
        },
    }[form]


def doubles(state: dict[str, NDArray[Any]]) -> dict[str, NDArray[np.float64]]:
    return {key: values.astype(np.float64) for key, values in state.items()}


def state_with(**parts: Any) -> dict[str, Any]:
    came = observation(DROID)
    state = {key: values[0, 0] for key, values in came["state"].items()} | parts
    return {**came, "state": {key: value for key, value in state.items() if value is not ...}}


def with_text(**keys: Any) -> dict[str, Any]:
    came = observation(DROID)
    del came["language"]
    return {**came, **keys}
