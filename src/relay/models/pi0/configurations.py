"""openpi's released configurations by name: what their checkpoints don't say about themselves.

openpi keeps these facts in its training code and not beside the weights (openpi: src/openpi/training/config.py and
misc/polaris_config.py), so whoever serves a checkpoint names its configuration.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, Literal

from relay.engine.weights import CheckpointError
from relay.models.pi0.config import Family


@dataclass(frozen=True, slots=True)
class Configuration:
    """What one of openpi's configurations says.

    Attributes:
        action_horizon: steps in a chunk.
        asset_id: folder of the statistics below `assets`.
        robot: the robot profile that does what the configuration's data transforms do.
        state_in_prompt: openpi's `discrete_state_input`.
        metadata: openpi's `policy_metadata`, which clients read from the handshake.
    """

    family: Family
    action_horizon: int
    asset_id: str
    robot: str
    state_in_prompt: bool
    max_token_len: int
    normalization: Literal["z_score", "quantile"]
    action_dim: int = 32
    paligemma_variant: str = "gemma_2b"
    num_steps: int = 10
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def settings(self) -> dict[str, Any]:
        """The same as keys of `relay.json`."""
        return {
            "model": self.family,
            "action_horizon": self.action_horizon,
            "action_dim": self.action_dim,
            "state_in_prompt": self.state_in_prompt,
            "max_token_len": self.max_token_len,
            "num_steps": self.num_steps,
            "normalization": self.normalization,
            "asset_id": self.asset_id,
            "robot": self.robot,
            "metadata": dict(self.metadata) or None,
        }


def find_configuration(name: str) -> Configuration:
    """The configuration of this name.

    Raises:
        CheckpointError: with the nearest name and all of them.
    """
    if name not in CONFIGURATIONS:
        near = get_close_matches(name, CONFIGURATIONS, n=1)
        hint = f", did you mean {near[0]!r}?" if near else ""
        raise CheckpointError(f"configuration {name!r} is not known{hint}; known are {', '.join(CONFIGURATIONS)}")
    return CONFIGURATIONS[name]


def _pi0(action_horizon: int, asset_id: str, robot: str, **others: Any) -> Configuration:
    usual = {"state_in_prompt": False, "max_token_len": 48, "normalization": "z_score"}
    return Configuration("pi0", action_horizon, asset_id, robot, **(usual | others))


def _pi05(action_horizon: int, asset_id: str, robot: str, **others: Any) -> Configuration:
    usual = {"state_in_prompt": True, "max_token_len": 200, "normalization": "quantile"}
    return Configuration("pi05", action_horizon, asset_id, robot, **(usual | others))


_ALOHA_RESET = {"reset_pose": [0, -1.5, 1.5, 0, 0, 0]}
_LIBERO = "physical-intelligence/libero"

CONFIGURATIONS: Mapping[str, Configuration] = {
    "pi0_aloha": _pi0(50, "trossen", "aloha", metadata=_ALOHA_RESET),
    "pi0_aloha_towel": _pi0(50, "trossen", "aloha", metadata=_ALOHA_RESET),
    "pi0_aloha_tupperware": _pi0(50, "trossen", "aloha", metadata=_ALOHA_RESET),
    "pi0_aloha_pen_uncap": _pi0(50, "trossen", "aloha"),
    "pi0_aloha_sim": _pi0(50, "lerobot/aloha_sim_transfer_cube_human", "aloha-sim"),
    "pi0_droid": _pi0(10, "droid", "droid"),
    "pi0_droid_jointpos_polaris": _pi0(10, "droid", "droid-jointpos", max_token_len=100),
    "pi0_droid_jointpos_100k_polaris": _pi0(10, "droid", "droid-jointpos", max_token_len=100),
    "pi0_libero": _pi0(50, _LIBERO, "libero-delta"),
    "pi05_aloha": _pi05(50, "trossen", "aloha", metadata=_ALOHA_RESET),
    "pi05_aloha_pen_uncap": _pi05(50, "trossen", "aloha"),
    "pi05_droid": _pi05(15, "droid", "droid"),
    "pi05_droid_finetune": _pi05(16, "droid", "droid"),
    "pi05_full_droid_finetune": _pi05(16, "droid", "droid-jointpos"),
    "pi05_droid_jointpos_polaris": _pi05(15, "droid", "droid-jointpos"),
    "pi05_libero": _pi05(10, _LIBERO, "libero", state_in_prompt=False),
}
"""Every configuration of π0 and π0.5 that openpi has for inference."""
