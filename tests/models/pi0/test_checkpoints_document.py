"""docs/checkpoints.md: its tables are what the code has."""

from __future__ import annotations

import json
import re
from pathlib import Path

from relay.models.pi0.configurations import CONFIGURATIONS, Configuration
from relay.models.pi0.settings import KEYS

PAGE = (Path(__file__).parents[3] / "docs" / "checkpoints.md").read_text("utf-8")


def row(name: str, configuration: Configuration) -> str:
    network = {"pi0": "π0", "pi05": "π0.5"}[configuration.family]
    prompt = "yes" if configuration.state_in_prompt else "no"
    return (
        f"| `{name}` | {network} | {configuration.action_horizon} | {prompt} | {configuration.max_token_len} "
        f"| {configuration.normalization} | `{configuration.asset_id}` | `{configuration.robot}` |"
    )


def test_the_table_of_configurations_is_complete_and_right() -> None:
    assert re.findall(r"^\| `pi05?_.*", PAGE, re.MULTILINE) == [row(*item) for item in CONFIGURATIONS.items()]


def test_every_key_of_relay_json_is_explained_and_no_other() -> None:
    table = PAGE.partition("| key | meaning |")[2].partition("\n\n")[0]
    explained = [key for line in table.splitlines()[2:] for key in re.findall(r"`(\w+)`", line.split("|")[1])]
    assert sorted(explained) == sorted(KEYS)


def test_the_example_is_a_relay_json() -> None:
    (example,) = re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)
    assert json.loads(example).keys() <= KEYS.keys()
