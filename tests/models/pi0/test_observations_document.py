"""docs/observations.md: its example runs, its tables are those of the code."""

from __future__ import annotations

import re
from dataclasses import fields
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import relay
from relay.client.exchange import LastCall
from relay.engine.base import PolicySpec
from relay.engine.normalization import Normalization, Statistics
from relay.models.pi0.config import DEMO
from relay.models.pi0.engine import OPTIONS as HONOURED
from relay.models.pi0.tokenizer import PromptTokenizer, load_vocabulary
from relay.models.pi0.transforms import Pi0Prepared, prepare
from relay.protocol.errors import ObservationError
from relay.protocol.images import Codec, encode_frame
from relay.protocol.messages import Infer
from relay.protocol.msgpack_numpy import unpack
from relay.protocol.options import take_options
from relay.robots.profile_file import load_profile
from relay.server.dialects import OpenPIDialect, Reply
from relay.server.options import admit
from relay.server.remarks import misspelt_options
from relay.server.scheduler import Answer
from relay.server.settings import ServerSettings

PAGE = (Path(__file__).parents[3] / "docs" / "observations.md").read_text("utf-8")
SECTIONS = {section.partition("\n")[0]: section for section in re.split(r"^## ", PAGE, flags=re.MULTILINE)}
TOKENIZER = PromptTokenizer(
    load_vocabulary(Path(str(files("relay.demo").joinpath("weights", "tokenizer.json")))), DEMO.max_token_len, True
)
FRAME = np.zeros((4, 6, 3), np.uint8)
OBSERVATION = {"image": {"base_0_rgb": FRAME}, "state": np.zeros(4, np.float32), "prompt": "put the red cube"}
MATRIX = np.zeros((2, 4), np.float32)
CHUNKING = {"prev_actions": MATRIX, "inference_delay": 1, "execution_horizon": 4}
OPTIONS: dict[str, dict[str, Any]] = {
    "num_steps": {"num_steps": 5},
    "num_inference_steps": {"num_inference_steps": 5},
    "sampling_params": {"sampling_params": {"num_inference_steps": 5}},
    "seed": {"seed": 7},
    "noise": {"noise": MATRIX},
    "deadline_ms": {"deadline_ms": 50.0},
    "adapter_dir": {"adapter_dir": "fold-towel"},
    **dict.fromkeys(CHUNKING, CHUNKING),
    "executed_actions": {"executed_actions": MATRIX},
}


def rows(section: str) -> list[list[str]]:
    """The cells of a section's tables, headings left out."""
    lines = [line for line in SECTIONS[section].splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def names(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def blocks() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)


def demo_prepares(observation: dict[str, Any]) -> Pi0Prepared:
    rest = dict(observation)
    options = take_options(rest)
    return prepare(rest, options, DEMO, TOKENIZER)


def test_the_example_is_an_observation_of_which_nothing_is_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[Pi0Prepared] = []

    class Policy:
        def __init__(self, url: str) -> None: ...

        def get_server_metadata(self) -> dict[str, Any]:
            return {"state_dim": DEMO.action_dim}

        def infer(self, observation: dict[str, Any]) -> dict[str, Any]:
            sent.append(demo_prepares(observation))
            return {"actions": MATRIX}

    block = blocks()[0]
    (tmp_path / "frame.jpg").write_bytes(encode_frame(FRAME, Codec.JPEG_Q90))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(relay, "Policy", Policy)
    exec(compile(block, "observations.md", "exec"), {})
    assert sent[0].ignored == ()
    assert sent[0].num_steps == 5


@pytest.mark.parametrize("key", [key for row in rows("Keys") for key in names(row[0])])
def test_the_policy_knows_the_key(key: str) -> None:
    tokens = {"tokenized_prompt": np.array([2, 3]), "tokenized_prompt_mask": np.array([True, True])}
    observation = {"image_mask": {"base_0_rgb": True}, **OBSERVATION}
    if key in tokens:
        del observation["prompt"]
        observation.update(tokens)
    assert key in observation
    assert demo_prepares(observation).ignored == ()


def test_every_option_is_in_the_table() -> None:
    assert {name for row in rows("Request options") for name in names(row[0])} == {*OPTIONS, "session_id", "endpoint"}


@pytest.mark.parametrize(
    ("name", "today"),
    [(name, row[-1]) for row in rows("Request options") for name in names(row[0]) if name in OPTIONS],
)
def test_the_option_is_honoured_or_refused_as_the_table_says(name: str, today: str) -> None:
    spec = PolicySpec("pi05", (), 4, action_horizon=2, action_dim=4, num_steps=10, supported_options=HONOURED)
    options = take_options(dict(OPTIONS[name]))
    if today == "refused":
        with pytest.raises(ObservationError, match=r"is not an option of pi05|is not loaded"):
            admit(options, spec, None)
    else:
        assert admit(options, spec, None) == options


def test_the_timings_of_a_reply_are_those_of_the_table() -> None:
    answer = Answer(MATRIX, (), (), prepare_ms=1.0, queue_ms=2.0, model_ms=3.0)
    dialect = OpenPIDialect(ServerSettings(), relay_client=True)
    reply = unpack(dialect.actions(Reply(Infer({}), answer, ("a note",), 0.5, 7.0), prev_total_ms=8.0))
    timings = [f'{part}["{key}"]' for part in ("policy_timing", "server_timing") for key in reply[part]]
    assert [key for row in rows("The reply") for key in names(row[0]) if "timing" in key] == timings
    assert set(reply) == {"actions", "policy_timing", "server_timing", "notes"}


def test_the_fields_of_the_last_call_are_those_of_the_table() -> None:
    named = [key for row in rows("The reply") for key in names(row[0]) if "timing" not in key]
    assert sorted(named) == sorted(field.name for field in fields(LastCall))


def test_the_robots_example_is_one_of_its_profile() -> None:
    values: dict[str, Any] = {"np": np}
    exec(compile(blocks()[1], "observations.md", "exec"), values)
    reading = load_profile("droid").read(values["observation"])
    assert len(reading.frames) == 2
    assert reading.ignored == ()


def test_the_notes_are_those_of_the_table() -> None:
    *prepared, outside, misspelt = [
        (".*".join(map(re.escape, names(row[0])[0].split("…"))), "is refused" in row[1]) for row in rows("Notes")
    ]
    told = demo_prepares({**OBSERVATION, "prompt": "dance " * 60}).notes
    for (pattern, must_be_told), note in zip(prepared, told, strict=True):
        assert re.match(pattern, note.text)
        assert note.must_be_told is must_be_told
    ends = Statistics(q01=np.zeros(4), q99=np.ones(4))
    remark = Normalization("quantile", "openpi", ends, ends).outside(np.full(4, 57.3))
    assert remark is not None
    assert re.match(outside[0], remark)
    assert re.match(misspelt[0], misspelt_options(["adapter"])[0].text)
