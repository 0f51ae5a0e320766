"""Checkpoints that cannot be served, on the real command line: exit code 1, and the last words name thing and remedy.

One process runs all command lines one after the other, because importing torch is what takes the time.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from folders import TINY, change_json, write_lerobot, write_openpi, write_relay
from safetensors.torch import load_file, save_file

RUN = """
import json, sys
from relay.cli.main import main
for line in json.load(open(sys.argv[1])):
    try:
        outcome = main(["serve", *line, "--port", "0"])
    except SystemExit as end:
        outcome = end.code
    print(json.dumps(outcome), flush=True)
"""
DROID = ("--config", "pi05_droid")

Line = list[str]


def droid(folder: Path, **changes: Any) -> Path:
    return write_openpi(folder, "pi05", action_horizon=15, **changes)


def with_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    droid(folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


def without_statistics(folder: Path) -> Path:
    (droid(folder) / "assets/droid/norm_stats.json").unlink()
    return folder


def without_deviation(folder: Path) -> Path:
    change_json(droid(folder) / "assets/droid/norm_stats.json", "norm_stats", "actions", "q99", 2, value=0.3)
    change_json(folder / "assets/droid/norm_stats.json", "norm_stats", "actions", "q01", 2, value=0.3)
    return folder


def two_robots(folder: Path) -> Path:
    settings = {**TINY, "normalization": "quantile", "state_in_prompt": True, "max_token_len": 200, "num_steps": 10}
    return write_openpi(folder, "pi05", assets={"droid": (8, 8), "trossen": (14, 14)}, settings=settings)


def as_pickle(folder: Path) -> Path:
    tensors = load_file(droid(folder) / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / "model.pt")
    return folder


def cut_short(folder: Path) -> Path:
    weights = droid(folder) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    return folder


def with_tokenizer(folder: Path, name: str, content: str) -> Path:
    (droid(folder, tokenizer=False) / name).write_text(content)
    return folder


CASES: dict[str, tuple[Callable[[Path], Path], tuple[str, ...], tuple[str, ...]]] = {
    "one tensor missing": (
        lambda folder: with_tensors(folder, lambda tensors: tensors.pop("time_mlp_in.bias")),
        DROID,
        ("the checkpoint's tensors do not fit", "take a whole, unmodified checkpoint", "missing: time_mlp_in.bias"),
    ),
    "one tensor too many": (
        lambda folder: with_tensors(folder, lambda tensors: tensors.update(surprise=torch.zeros(2))),
        DROID,
        ("unknown: surprise",),
    ),
    "one tensor of another shape": (
        lambda folder: with_tensors(folder, lambda tensors: tensors.update({"action_in_proj.bias": torch.zeros(7)})),
        DROID,
        ("wrong shape: action_in_proj.bias is (7,), expected (32,)",),
    ),
    "no statistics": (
        without_statistics,
        DROID,
        ("no statistics: looked for", "assets/droid/norm_stats.json; copy the assets folder"),
    ),
    "statistics of two robots": (
        two_robots,
        (),
        ("holds statistics for several robots: droid, trossen; write the right one", "'asset_id'"),
    ),
    "no deviation in one dimension": (
        without_deviation,
        DROID,
        ("norm_stats.json: q99 - q01 of actions[2] is 0, so it cannot be scaled; compute the statistics",),
    ),
    "a pickle": (as_pickle, DROID, ("model.pt is a pickle, which can run code", "safetensors.torch.save_file")),
    "no tokenizer": (
        lambda folder: droid(folder, tokenizer=False),
        DROID,
        ("no tokenizer in", "google/paligemma-3b-pt-224 there, or pass --tokenizer FILE"),
    ),
    "another policy of lerobot's": (
        lambda folder: write_lerobot(folder, "pi05", config={"type": "pi0fast"}),
        (),
        ("this is a 'pi0fast' policy; pi0 and pi05 are served",),
    ),
    "a file that is cut short": (cut_short, DROID, ("model.safetensors is cut short", "fetch it again")),
    "an empty tokenizer.json": (
        lambda folder: with_tokenizer(folder, "tokenizer.json", "{}"),
        DROID,
        ("tokenizer.json is not a tokenizer file",),
    ),
    "a tokenizer.model that is none": (
        lambda folder: with_tokenizer(folder, "tokenizer.model", "no model at all"),
        DROID,
        ("tokenizer.model is not a SentencePiece model",),
    ),
    "a device that is none": (droid, (*DROID, "--device", "nope"), ("--device nope: ", "this machine has cpu")),
    "an unknown configuration": (droid, ("--config", "pi05_droit"), ("did you mean 'pi05_droid'?",)),
    "an unknown robot": (droid, (*DROID, "--robot", "droit"), ("droit", "did you mean 'droid'?")),
    "the other family": (lambda folder: write_relay(folder, "pi0"), (), ("this is a pi0 checkpoint; serve it as pi0",)),
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, int | str]:
    """What every command line ended with."""
    root = tmp_path_factory.mktemp("folders")
    lines: list[Line] = []
    for name, (write, options, _) in CASES.items():
        lines.append(["pi05", "--checkpoint", str(write(root / name)), *options])
    (root / "lines.json").write_text(json.dumps(lines))
    done = subprocess.run([sys.executable, "-c", RUN, root / "lines.json"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return dict(zip(CASES, map(json.loads, done.stdout.splitlines()), strict=True))


@pytest.mark.parametrize("name", list(CASES))
def test_a_checkpoint_that_cannot_be_served_says_what_is_wrong(name: str, outcomes: dict[str, int | str]) -> None:
    outcome = outcomes[name]  # SystemExit with a text: the text is printed, and the exit code is 1
    assert isinstance(outcome, str)
    assert outcome.startswith("relay: the policy could not be loaded: ")
    for text in CASES[name][2]:
        assert text in outcome
    assert "Traceback" not in outcome


def test_the_exit_code_is_1_and_the_sentence_comes_last(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "relay.cli.main", "serve", "pi05", "--checkpoint", without_statistics(tmp_path)]
    done = subprocess.run([*command, *DROID, "--port", "0"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "no statistics: looked for" in done.stderr.splitlines()[-1]
