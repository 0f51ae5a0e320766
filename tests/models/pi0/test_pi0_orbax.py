"""JAX checkpoints of the golden networks, written by Orbax itself in every layout, give the golden actions.

Orbax and JAX live in an environment of their own: `make references` makes it.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny import DATA, golden, golden_inputs, load_tiny, tiny_model

from relay.engine.orbax import OrbaxSource
from relay.engine.weights import CheckpointError
from relay.models.pi0.jax_names import from_jax

HERE = Path(__file__).parent
ORBAX_PYTHON = HERE.parents[2] / ".venv-orbax/bin/python"

pytestmark = pytest.mark.skipif(
    not ORBAX_PYTHON.exists(), reason="Orbax and JAX are not here; `make references` installs them"
)
pytest.importorskip("tensorstore", reason="tensorstore is not here: pip install 'relay-robotics[jax]'")


def write(folder: Path, family: str, *options: str) -> Path:
    """Have Orbax write a golden network as openpi's JAX training would."""
    command = [ORBAX_PYTHON, HERE / "write_orbax.py", DATA / f"{family}_tiny.safetensors", folder / "params", *options]
    done = subprocess.run(command, env={"JAX_PLATFORMS": "cpu"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder / "params"


@pytest.mark.parametrize(
    ("family", "options"),
    [
        pytest.param("pi0", "--value", id="pi0 as training writes it"),
        pytest.param("pi05", "--value", id="pi05 as training writes it"),
        pytest.param("pi05", "--dtype bfloat16", id="bare leaves in bfloat16"),
        pytest.param("pi0", "--no-ocdbt", id="a folder per array"),
        pytest.param("pi05", "--zarr3", id="zarr 3"),
        pytest.param("pi0", "--zarr3 --no-ocdbt --value", id="zarr 3, a folder per array"),
        pytest.param("pi05", "--chunk-bytes 3000", id="many chunks"),
    ],
)
def test_a_checkpoint_that_orbax_wrote_gives_the_golden_actions(family: str, options: str, tmp_path: Path) -> None:
    model = load_tiny(from_jax(OrbaxSource(write(tmp_path, family, *options.split()))))
    actions = model.sample_actions(golden_inputs(family, (0, 1), 10)).numpy()
    reference = golden(family)["actions_f32_10"]
    assert np.abs(actions - reference).max() / reference.std() <= 1e-4
    expected = tiny_model(family).state_dict()
    assert all(torch.equal(parameter, expected[name]) for name, parameter in model.named_parameters())


def test_lora_tensors_of_openpi_are_not_dropped(tmp_path: Path) -> None:
    name = "PaliGemma/llm/layers/attn/q_einsum/lora_a"
    source = from_jax(OrbaxSource(write(tmp_path, "pi05", "--add", name)))
    with pytest.raises(CheckpointError, match=f"adapter: {name}"):
        load_tiny(source)
