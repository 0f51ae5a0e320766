"""Records what openpi answers, for `relay parity`. Run it where openpi runs; it needs nothing of relay.

uv run record_openpi.py pi05_droid checkpoints/pi05_droid recording.npz

The checkpoint is a local folder, JAX or PyTorch. Observations are openpi's own random examples, or yours: an .npz with
one array per key, samples on axis 0, and the texts as `prompt`. Written after openpi 15a9616.
"""

import argparse
import dataclasses
import json
from importlib.metadata import version

import numpy as np


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("config", help="openpi's configuration, such as pi05_droid")
    parser.add_argument("checkpoint")
    parser.add_argument("output", help="file that ends in .npz")
    parser.add_argument("--observations", help=".npz with your own observations")
    parser.add_argument("--samples", type=int, default=4, help="how many examples without --observations")
    parser.add_argument("--num-steps", type=int, default=10)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    np.random.seed(options.seed)  # openpi's examples draw from it
    config, policy = load(options.config, options.checkpoint, options.dtype, options.num_steps)
    if options.observations:
        observations = read_observations(options.observations)
    else:
        observations = [example(options.config) for _ in range(options.samples)]
    shape = (len(observations), config.model.action_horizon, config.model.action_dim)
    noise = np.random.default_rng(options.seed).standard_normal(shape).astype(np.float32)
    actions = [policy.infer(one, noise=drawn)["actions"] for one, drawn in zip(observations, noise, strict=True)]
    metadata = {
        "source": "openpi",
        "versions": {name: version(name) for name in ("openpi", "jax", "torch", "transformers")},
        "dtype": options.dtype,
        "units": "robot",
        "config": options.config,
    }
    write(options.output, observations, noise, options.num_steps, actions, metadata)


def load(name, checkpoint, dtype, num_steps):
    import jax
    import jax.numpy as jnp
    import torch
    from openpi.models import model as models
    from openpi.models_pytorch.gemma_pytorch import PaliGemmaWithExpertModel
    from openpi.policies import policy_config
    from openpi.training import config as training

    config = training.get_config(name)
    model = dataclasses.replace(config.model, dtype=dtype, pytorch_compile_mode=None)
    config = dataclasses.replace(config, model=model)
    if dtype == "float32":  # openpi serves in bfloat16 whatever the configuration says
        jax.config.update("jax_default_matmul_precision", "highest")
        restore = models.restore_params
        models.restore_params = lambda path, **kwargs: restore(path, **{**kwargs, "dtype": jnp.float32})
        PaliGemmaWithExpertModel.to_bfloat16_for_selected_params = lambda self, precision="": self.float()
    policy = policy_config.create_trained_policy(config, checkpoint, sample_kwargs={"num_steps": num_steps})
    if dtype == "float32":  # after loading: openpi's PyTorch model allows TF32 when it is made
        torch.set_float32_matmul_precision("highest")
        torch.backends.cudnn.allow_tf32 = False
    return config, policy


def example(config):
    from openpi.policies import aloha_policy, droid_policy, libero_policy

    if "aloha" in config:
        made = aloha_policy.make_aloha_example()
        del made["images"]["cam_low"]  # openpi takes it and does not use it
        return made
    return libero_policy.make_libero_example() if "libero" in config else droid_policy.make_droid_example()


def read_observations(path):
    """One dict per sample; `images/cam_high` becomes an entry of the map `images`, as openpi's ALOHA has it."""
    with np.load(path) as file:
        columns = {key: file[key] for key in file.files}
    observations = []
    for index in range(len(columns["prompt"])):
        observation = {}
        for key, column in columns.items():
            value = str(column[index]) if key == "prompt" else column[index]
            if key.startswith("images/"):
                observation.setdefault("images", {})[key.removeprefix("images/")] = value
            else:
                observation[key] = value
        observations.append(observation)
    return observations


def flatten(observation):
    """Arrays by key; those of a map by `map/key`."""
    flat = {}
    for key, value in observation.items():
        entries = {f"{key}/{inner}": part for inner, part in value.items()} if isinstance(value, dict) else {key: value}
        flat.update({name: np.asarray(part) for name, part in entries.items()})
    return flat


def write(path, observations, noise, num_steps, actions, metadata):
    """The file that docs/parity.md describes."""
    flat = [flatten(observation) for observation in observations]
    columns = {key: np.stack([one[key] for one in flat]) for key in flat[0]}
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
