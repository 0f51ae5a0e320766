"""Records what lerobot's π0 or π0.5 answers, for `relay parity`. Run it where lerobot runs; it needs nothing of relay.

python record_lerobot.py outputs/train/my_run/checkpoints/last/pretrained_model recording.npz

Observations are random, or yours: an .npz with one array per key of the policy's `input_features`, samples on axis 0,
frames (samples, height, width, 3) uint8, and the texts as `prompt`. Written after lerobot 0.6.1.
"""

import argparse
import json
from importlib.metadata import version
from pathlib import Path

import numpy as np

STATE, IMAGES = "observation.state", "observation.images."


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("checkpoint")
    parser.add_argument("output", help="file that ends in .npz")
    parser.add_argument("--observations", help=".npz with your own observations")
    parser.add_argument("--samples", type=int, default=4, help="how many random ones without --observations")
    parser.add_argument("--num-steps", type=int, default=10)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    rng = np.random.default_rng(options.seed)
    config, infer = load(options.checkpoint, options.dtype, options.device, options.num_steps)
    if options.observations:
        observations = read_observations(options.observations)
    else:
        cameras = [key for key in config.image_features if "empty_camera_" not in key]
        width = config.robot_state_feature.shape[0]
        observations = [
            random_observation(rng, cameras, config.image_resolution, width) for _ in range(options.samples)
        ]
    observations = [fitted(observation, config.image_resolution) for observation in observations]
    shape = (len(observations), config.chunk_size, config.max_action_dim)
    noise = rng.standard_normal(shape).astype(np.float32)
    actions = [infer(one, drawn) for one, drawn in zip(observations, noise, strict=True)]
    metadata = {
        "source": "lerobot",
        "versions": {name: version(name) for name in ("lerobot", "torch", "transformers")},
        "dtype": options.dtype,
        "units": "robot",
    }
    write(options.output, observations, noise, options.num_steps, actions, metadata)


def load(checkpoint, dtype, device, num_steps):
    """The policy's configuration, and a function from an observation and noise to actions in robot units."""
    import torch
    from lerobot.configs import PreTrainedConfig
    from lerobot.policies.factory import get_policy_class, make_pre_post_processors
    from safetensors import safe_open

    config = PreTrainedConfig.from_pretrained(checkpoint)
    config.dtype, config.device, config.compile_model = dtype, device, False
    policy = get_policy_class(config.type).from_pretrained(checkpoint, config=config).eval()
    with safe_open(Path(checkpoint) / "model.safetensors", "pt") as file:  # lerobot goes on with random weights
        name = next(key for key in file.keys() if key.endswith("action_out_proj.bias"))  # noqa: SIM118
        stored = file.get_tensor(name).float()
    if not torch.equal(policy.model.action_out_proj.bias.detach().cpu().float(), stored):
        raise SystemExit("lerobot did not load the weights: see what it printed")
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    before, after = make_pre_post_processors(
        config,
        checkpoint,
        preprocessor_overrides={"device_processor": {"device": device}},
        postprocessor_overrides={"device_processor": {"device": "cpu"}},
    )

    @torch.no_grad()
    def infer(observation, noise):
        batch = {"task": str(observation["prompt"])}
        for key, value in observation.items():
            if key.startswith(IMAGES):
                batch[key] = torch.from_numpy(value.copy()).permute(2, 0, 1).float() / 255  # (3, height, width)
            elif key != "prompt":
                batch[key] = torch.from_numpy(np.asarray(value, np.float32))
        start = torch.from_numpy(noise)[None].to(device)  # (1, horizon, action_dim)
        chunk = policy.predict_action_chunk(before(batch), noise=start, num_steps=num_steps)
        return after(chunk)[0].float().cpu().numpy()  # (horizon, the robot's width)

    return config, infer


def random_observation(rng, cameras, resolution, state_dim):
    height, width = resolution
    frames = {key: rng.integers(256, size=(height, width, 3), dtype=np.uint8) for key in cameras}
    return {**frames, STATE: rng.uniform(-1, 1, state_dim).astype(np.float32), "prompt": "pick up the fork"}


def read_observations(path):
    with np.load(path) as file:
        columns = {key: file[key] for key in file.files}
    return [{key: column[index] for key, column in columns.items()} for index in range(len(columns["prompt"]))]


def fitted(observation, resolution):
    """Frames at the network's size, with Pillow's filter as openpi serves: lerobot's own does not smooth."""
    return {
        key: resize_with_pad(value, *resolution) if key.startswith(IMAGES) else value
        for key, value in observation.items()
    }


def resize_with_pad(frame, height, width):
    from PIL import Image

    if frame.shape[:2] == (height, width):
        return frame
    ratio = max(frame.shape[1] / width, frame.shape[0] / height)
    size = int(frame.shape[1] / ratio), int(frame.shape[0] / ratio)
    padded = Image.new("RGB", (width, height))
    padded.paste(
        Image.fromarray(frame).resize(size, Image.Resampling.BILINEAR),
        ((width - size[0]) // 2, (height - size[1]) // 2),
    )
    return np.asarray(padded)


def write(path, observations, noise, num_steps, actions, metadata):
    """The file that docs/parity.md describes."""
    columns = {key: np.stack([observation[key] for observation in observations]) for key in observations[0]}
    np.savez_compressed(
        path,
        **columns,
        noise=np.asarray(noise, np.float32),
        num_steps=np.int64(num_steps),
        actions=np.stack(actions),
        metadata=json.dumps(metadata),
    )


if __name__ == "__main__":
    main()
