"""Numbers that others can make again."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from field.loopback import serving, state
from relay.cli.main import main
from relay.protocol import msgpack_numpy


def test_a_measurement_holds_what_is_needed_to_repeat_it(tmp_path: Path) -> None:
    """flashrt-project/FlashRT#170, #188."""
    output, observation = tmp_path / "numbers.json", tmp_path / "observation.msgpack"
    observation.write_bytes(msgpack_numpy.pack(state(1.0)))
    with serving() as server:
        arguments = ["--calls", "10", "--warm-up", "3", "--observation", str(observation), "--output", str(output)]
        assert main(["bench", server.url, *arguments]) == 0
    numbers = json.loads(output.read_text())
    assert {"relay", "python", "numpy", "websockets"} <= numbers["versions"].keys()
    assert {"platform", "cpu", "cores", "clock"} <= numbers["machine"].keys()
    assert numbers["parameters"]["observation"] == str(observation)
    assert (numbers["left_out"], numbers["counted"], len(numbers["calls"])) == (3, 10, 10)
    assert numbers["whole_ms"].keys() == {"p50", "p90", "p99"}
    assert {"parse", "queue", "model", "reply"} <= numbers["stages_ms"]["p99"].keys()
    whole = [call["whole_ms"] for call in numbers["calls"]]
    assert numbers["whole_ms"]["p90"] == np.percentile(whole, 90)
