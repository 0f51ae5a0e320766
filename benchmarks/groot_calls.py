"""One GR00T N1.7 request in our network and in lerobot's, for `engine.py`: true depth, narrow, random weights.

The observation is DROID's: two cameras, two frames of 180x320 each, which become 4 images of 256x448; batch 1, 4 steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from relay.models.groot.inputs import GrootRow
    from relay.models.groot.model import Groot

WIDTHS: dict[str, dict[str, int]] = {
    "tiny": {"vision": 32, "vision_mlp": 64, "text": 64, "text_mlp": 96, "head_dim": 16, "dit": 32, "hidden": 24},
    "small": {
        "vision": 128,
        "vision_mlp": 512,
        "text": 256,
        "text_mlp": 768,
        "head_dim": 64,
        "dit": 192,
        "hidden": 128,
    },
}
HEADS, KV_HEADS, SLOT, STEPS, ACTION_DIM = 4, 2, 2, 4, 132
IMAGES, GRID, WORDS = 4, (16, 28), 11
IMAGE_TOKEN, VISION_START, VISION_END = 151_655, 151_652, 151_653


def backbone(widths: dict[str, int]) -> dict[str, Any]:
    """The backbone's sizes in the form that our configuration takes."""
    section = widths["head_dim"] // 8
    return {
        "text_config": {
            "vocab_size": 151_936,
            "hidden_size": widths["text"],
            "intermediate_size": widths["text_mlp"],
            "num_hidden_layers": 28,
            "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS,
            "head_dim": widths["head_dim"],
            "rms_norm_eps": 1e-6,
        },
        "rope_theta": 5_000_000,
        "mrope_section": [2 * section, section, section],
        "vision_config": {
            "depth": 24,
            "hidden_size": widths["vision"],
            "hidden_act": "gelu_pytorch_tanh",
            "intermediate_size": widths["vision_mlp"],
            "num_heads": HEADS,
            "in_channels": 3,
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "out_hidden_size": widths["text"],
            "num_position_embeddings": 2304,
            "deepstack_visual_indexes": [5, 11, 17],
        },
        "image_token_id": IMAGE_TOKEN,
    }


def model_config(widths: dict[str, int]) -> dict[str, Any]:
    """A `config.json` of the released depth, horizon and steps."""
    return {
        "select_layer": 16,
        "backbone_embedding_dim": widths["text"],
        "hidden_size": widths["hidden"],
        "input_embedding_dim": widths["dit"],
        "max_state_dim": ACTION_DIM,
        "max_action_dim": ACTION_DIM,
        "action_horizon": 40,
        "max_num_embodiments": 4,
        "max_seq_len": 1024,
        "num_inference_timesteps": STEPS,
        "num_timestep_buckets": 1000,
        "attend_text_every_n_blocks": 2,
        "state_history_length": 1,
        "use_vlln": True,
        "use_alternate_vl_dit": True,
        "add_pos_embed": True,
        "diffusion_model_cfg": {
            "num_layers": 32,
            "num_attention_heads": HEADS,
            "attention_head_dim": widths["dit"] // HEADS,
            "output_dim": widths["hidden"],
            "norm_type": "ada_norm",
            "interleave_self_attention": True,
            "positional_embeddings": None,
        },
        "vl_self_attention_cfg": {
            "num_layers": 4,
            "num_attention_heads": HEADS,
            "attention_head_dim": widths["text"] // HEADS,
            "positional_embeddings": None,
        },
    }


def prompt() -> list[int]:
    """Token ids of one request."""
    image = [VISION_START, *[IMAGE_TOKEN] * (GRID[0] * GRID[1] // 4), VISION_END]
    return [151_644, 872, 198, *image * IMAGES, *range(1000, 1000 + WORDS), 151_645, 198]


def our_call(widths: dict[str, int]) -> Callable[[], object]:
    import torch

    from relay.models.groot.assemble import assemble
    from relay.models.groot.model import Groot

    model, row = our_network(widths)
    noise = torch.randn(1, 40, ACTION_DIM)
    # Without inference mode, under which composite operations would be counted as one.
    sample = Groot.sample_actions.__wrapped__  # pyright: ignore[reportFunctionMemberAccess]
    return lambda: sample(model, assemble(model, [row], noise, STEPS))


def our_network(widths: dict[str, int]) -> tuple[Groot, GrootRow]:
    """A network of random weights, and a row for it."""
    import numpy as np

    from relay.models.groot.config import read_config
    from relay.models.groot.inputs import GrootRow
    from relay.models.groot.model import Groot

    model = Groot(read_config(model_config(widths), backbone(widths)), [SLOT]).eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.02)
    images = tuple(np.random.randint(0, 256, (16 * GRID[0], 16 * GRID[1], 3), np.uint8) for _ in range(IMAGES))
    return model, GrootRow(np.array(prompt()), images, np.zeros(ACTION_DIM, np.float32), SLOT)


def lerobots_call(widths: dict[str, int]) -> Callable[[], object]:
    import importlib

    import torch

    groot: Any = importlib.import_module("lerobot.policies.groot.groot_n1_7")
    transformers: Any = importlib.import_module("transformers")
    sizes = backbone(widths)
    rope = {"mrope_interleaved": True, "mrope_section": sizes["mrope_section"], "rope_type": "default"}
    text = sizes["text_config"] | {"rope_theta": sizes["rope_theta"], "rope_scaling": rope, "hidden_act": "silu"}
    resized = transformers.Qwen3VLConfig(
        image_token_id=IMAGE_TOKEN,
        video_token_id=IMAGE_TOKEN + 1,
        vision_start_token_id=VISION_START,
        vision_end_token_id=VISION_END,
        tie_word_embeddings=True,
        text_config=text,
        vision_config=sizes["vision_config"],
    )
    groot._cosmos_reason2_qwen3_vl_config = lambda: resized
    config = groot.GR00TN17Config(**model_config(widths))
    model = groot.GR00TN17(config, load_backbone_weights=False).float().eval()
    patches = GRID[0] * GRID[1]
    inputs = {
        "input_ids": torch.tensor([prompt()]),
        "attention_mask": torch.ones(1, len(prompt()), dtype=torch.long),
        "pixel_values": torch.rand(IMAGES * patches, 1536) * 2 - 1,
        "image_grid_thw": torch.tensor([[1, *GRID]] * IMAGES),
        "state": torch.zeros(1, 1, ACTION_DIM),
        "embodiment_id": torch.tensor([SLOT]),
    }
    return lambda: model.get_action(dict(inputs))
