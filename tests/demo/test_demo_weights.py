"""The shipped weights are the ones that the model card describes."""

from __future__ import annotations

import hashlib
import json
import re
from importlib.resources import files
from pathlib import Path

import pytest

WEIGHTS = Path(str(files("relay.demo").joinpath("weights")))
ADAPTER = WEIGHTS / "adapters" / "demo-cross"
CARD = (WEIGHTS / "MODEL_CARD.md").read_text("utf-8")


def test_the_weights_have_the_hash_that_the_model_card_states() -> None:
    for file in (WEIGHTS / "model.safetensors", ADAPTER / "adapter_model.safetensors"):
        assert f"`{hashlib.sha256(file.read_bytes()).hexdigest()}`" in CARD


def test_the_weights_are_small_enough_to_ship() -> None:
    assert sum(path.stat().st_size for path in WEIGHTS.rglob("*")) < 20_000_000
    assert sum(path.stat().st_size for path in ADAPTER.iterdir()) < 500_000


@pytest.mark.parametrize("folder", [WEIGHTS, ADAPTER], ids=["policy", "adapter"])
def test_the_model_card_states_the_run_that_made_them(folder: Path) -> None:
    record = json.loads((folder / "training.json").read_text("utf-8"))
    assert record["step"] == record["observations"] // record["batch"]
    assert f"{record['observations']:,} observations" in CARD
    assert re.search(rf"\b{record['minutes']:.0f} minutes\b", CARD)


@pytest.mark.parametrize("name", ["relay.json", "tokenizer.json", "norm_stats.json"])
def test_what_the_tensors_do_not_say_ships_beside_them(name: str) -> None:
    assert json.loads((WEIGHTS / name).read_text("utf-8"))


@pytest.mark.torch
def test_the_tokenizer_is_the_one_that_the_training_writes(tmp_path: Path) -> None:
    from relay.demo.vocabulary import write_tokenizer

    write_tokenizer(tmp_path / "tokenizer.json")
    assert json.loads((tmp_path / "tokenizer.json").read_text()) == json.loads((WEIGHTS / "tokenizer.json").read_text())
