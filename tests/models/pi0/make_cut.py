r"""Write the smallest π0.5 network that has every tensor: `python tests/models/pi0/make_cut.py WEIGHTS.safetensors`.

tests/data/pi0/cut.safetensors came from it, and tests/data/pi0/cut_jax/params from

    .venv-orbax/bin/python tests/models/pi0/write_orbax.py tests/data/pi0/cut.safetensors \
        tests/data/pi0/cut_jax/params --heads 2 --dtype bfloat16 --value

without `commit_success.txt` and `_sharding`, which say where it was written.
"""

from __future__ import annotations

import sys

import torch
from safetensors.torch import save_file

from relay.models.pi0.config import Pi0Config, TransformerSize, VisionSize
from relay.models.pi0.model import Pi0
from relay.models.pi0.weights import save_weights

CUT = Pi0Config(
    family="pi05",
    vision=VisionSize(width=12, depth=2, mlp=20, heads=2, patch=14, image_size=28),
    language=TransformerSize(width=24, depth=2, mlp=40),
    expert=TransformerSize(width=16, depth=2, mlp=28),
    heads=2,
    head_dim=6,
    vocab_size=32,
    action_dim=8,
    action_horizon=4,
    state_dim=8,
    max_token_len=16,
    state_in_prompt=True,
)

if __name__ == "__main__":
    torch.manual_seed(0)
    model = Pi0(CUT)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    save_file(save_weights(model, torch.bfloat16), sys.argv[1])
