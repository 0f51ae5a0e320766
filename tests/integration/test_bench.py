"""`relay bench` and `examples/demo.py` against real servers: the table, the link's share, the route, the numbers."""

from __future__ import annotations

import json
import runpy
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from echo_engine import EchoEngine
from stock_environment import FRAME, needs_stock
from test_stock_peers import stock_server  # noqa: F401
from threaded_server import serving

import relay.bench.run as bench_run
from fault_proxy import FaultProxy, in_thread
from relay.cli.main import main
from relay.client.direct_route import failed_addresses
from relay.protocol import msgpack_numpy
from relay.server.api_keys import read_api_keys

EXAMPLE = Path(__file__).parents[2] / "examples/demo.py"
VLLM_PATH = "/v1/realtime/robot/openpi"
STAGES = {"encode", "upload", "parse", "prepare", "queue", "model", "reply", "download", "decode"}

Measure = Callable[..., dict[str, Any]]


@pytest.fixture
def measured(tmp_path: Path) -> Measure:
    """Run `examples/demo.py` as a program would be; returns the numbers."""
    example: Callable[[list[str]], int] = runpy.run_path(str(EXAMPLE))["main"]

    def measure(*arguments: str) -> dict[str, Any]:
        output = tmp_path / "numbers.json"
        assert example([*arguments, "--output", str(output)]) == 0
        return json.loads(output.read_text())

    return measure


def test_the_table_is_printed_with_every_stage_and_the_numbers_add_up(
    demo_url: str, measured: Measure, capsys: pytest.CaptureFixture[str]
) -> None:
    numbers = measured(demo_url, "--calls", "20", "--warm-up", "2")
    for share in ("p50", "p90", "p99"):
        assert set(numbers["stages_ms"][share]) == STAGES
        assert sum(numbers["stages_ms"][share].values()) == pytest.approx(numbers["whole_ms"][share], rel=0.05)
    assert numbers["counted"] == len(numbers["calls"]) == 20
    assert numbers["left_out"] == 2
    assert numbers["versions"]["relay"]
    assert numbers["machine"]["clock"]
    assert numbers["parameters"]["url"] == demo_url
    assert numbers["route"] == "proxied"
    printed = capsys.readouterr().out
    assert "20, after 2 for warm-up that are left out" in printed
    assert all(f"  {stage}" in printed for stage in STAGES)
    assert "take " in printed


def test_frames_go_as_the_chosen_codec_makes_them(demo_url: str, measured: Measure) -> None:
    sent = {
        codec: measured(demo_url, "--codec", codec, "--calls", "2", "--warm-up", "0", "--codec-rounds", "0")
        for codec in ("RAW", "LOSSLESS", "JPEG_Q90", "JPEG_Q50")
    }
    assert [numbers["sent_as"] for numbers in sent.values()] == list(sent)
    sizes = [numbers["bytes_sent"] for numbers in sent.values()]
    assert sizes == sorted(set(sizes), reverse=True)


def test_a_slow_links_share_shows_and_a_smaller_codec_is_advised(
    demo_url: str, measured: Measure, capsys: pytest.CaptureFixture[str]
) -> None:
    with in_thread(FaultProxy(int(demo_url.rpartition(":")[2]))) as proxy:
        for direction in (proxy.to_server, proxy.to_client):
            direction.latency, direction.bytes_per_second = 0.030, 20e6 / 8
        numbers = measured(proxy.url, "--calls", "12", "--warm-up", "1")
    mean = numbers["stages_ms"]["mean"]
    assert mean["upload"] >= 30  # at least 30 ms one way
    assert mean["download"] >= 15
    assert mean["upload"] + mean["download"] >= 60
    assert numbers["link"]["ms_per_byte"] == pytest.approx(1000 / (20e6 / 8), rel=0.5)
    sizes = {each["codec"]: each["bytes_sent"] for each in numbers["codecs"]}
    assert sizes["RAW"] > sizes["LOSSLESS"] > sizes["JPEG_Q90"] > sizes["JPEG_Q50"]
    assert numbers["recommended"] in ("JPEG_Q90", "JPEG_Q50")
    assert f"take {numbers['recommended']}: " in capsys.readouterr().out


def test_on_vllm_omnis_path_only_the_clients_timings_are_shown_and_that_is_said(
    demo_url: str, measured: Measure, capsys: pytest.CaptureFixture[str]
) -> None:
    numbers = measured(demo_url + VLLM_PATH, "--calls", "3", "--warm-up", "1")
    assert set(numbers["stages_ms"]["p50"]) == {"encode", "link and server", "decode"}
    assert "Only the client's timings exist on this path" in " ".join(capsys.readouterr().out.split())


def test_the_route_in_use_is_told_and_may_be_refused(
    measured: Measure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failed_addresses.clear()
    monkeypatch.delenv("WALLE_DIRECT", raising=False)
    with closing(socket.create_server(("127.0.0.1", 0))) as probe:
        port = probe.getsockname()[1]
    with serving(EchoEngine(), direct_url=f"ws://127.0.0.1:{port}", direct_port=port) as url:
        numbers = measured(url, "--calls", "3")
        assert numbers["route"] == "direct"
        assert "direct, to the server's own address" in capsys.readouterr().out
        output = tmp_path / "stayed.json"
        assert main(["bench", url, "--calls", "3", "--codec-rounds", "0", "--no-direct", "--output", str(output)]) == 0
    assert json.loads(output.read_text())["route"] == "proxied"


@needs_stock
def test_a_stock_server_is_measured_with_the_one_time_that_it_tells(
    stock_server: str,  # noqa: F811
    measured: Measure,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    observation = tmp_path / "observation.msgpack"
    state = np.array([1, 2, 3], np.float32)
    observation.write_bytes(msgpack_numpy.pack({"image": {"base_0_rgb": FRAME}, "state": state, "prompt": "pick"}))
    numbers = measured(stock_server, "--calls", "5", "--observation", str(observation))
    assert set(numbers["stages_ms"]["p50"]) == {"encode", "link", "policy", "decode"}
    assert numbers["sent_as"] == "arrays"
    assert numbers["codecs"] == []
    assert "cannot be told from that" in " ".join(capsys.readouterr().out.split())


def test_the_command_draws_a_picture_too(demo_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "bench.png"
    assert main(["bench", demo_url, "--calls", "3", "--codec-rounds", "0", "--plot", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "link  " in capsys.readouterr().out  # without the codecs its directions aren't known


def test_without_matplotlib_it_is_said_how_to_get_it(
    demo_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    picture = tmp_path / "bench.png"
    assert main(["bench", demo_url, "--calls", "2", "--codec-rounds", "0", "--plot", str(picture)]) == 0
    assert "drawing needs matplotlib; install it with: pip install 'relay-robotics[demo]'" in capsys.readouterr().err
    assert not picture.exists()


def test_a_refused_observation_is_told_in_the_servers_words(demo_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", demo_url, "--robot", "droid", "--calls", "2"]) == 1
    assert "relay bench: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "value", "told"),
    [
        ("--calls", "0", "calls must be at least 1, got 0"),
        ("--frame-size", "20000", "frame_size must be at most 4096, got 20000"),
        ("--interval", "inf", "interval must be between 0 and 3600 s, got inf"),
        ("--interval", "nan", "interval must be between 0 and 3600 s, got nan"),
        ("--timeout", "0", "timeout must be a number of seconds above 0, got 0"),
        ("--connect-timeout", "nan", "connect_timeout must be a number of seconds above 0, got nan"),
    ],
)
def test_a_number_that_cannot_be_is_refused_before_anything_is_sent(
    option: str, value: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "ws://127.0.0.1:9", option, value]) == 2
    assert told in capsys.readouterr().err


def test_a_server_that_is_not_there_is_waited_for_no_longer_than_allowed(capsys: pytest.CaptureFixture[str]) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as probe:
        port = probe.getsockname()[1]
    assert main(["bench", f"ws://127.0.0.1:{port}", "--connect-timeout", "0.3"]) == 1
    assert f"relay bench: no policy server at ws://127.0.0.1:{port} within 0.3 s" in capsys.readouterr().err


def test_a_policy_that_does_not_answer_is_waited_for_no_longer_than_allowed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    observation = tmp_path / "observation.msgpack"
    observation.write_bytes(msgpack_numpy.pack({"state": np.zeros(3, np.float32), "sleep": 2.0}))
    with serving(EchoEngine()) as url:
        assert main(["bench", url, "--observation", str(observation), "--timeout", "0.2"]) == 1
    assert "relay bench: " in capsys.readouterr().err


def test_a_server_without_room_for_the_codecs_connections_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_run, "_LONGEST_WAIT_FOR_ROOM_S", 0.5)
    with serving(EchoEngine(), max_connections=1) as url:
        assert main(["bench", url, "--calls", "2"]) == 1
        assert "comparing codecs takes a connection for each: --codec-rounds 0" in capsys.readouterr().err
        assert main(["bench", url, "--calls", "2", "--codec-rounds", "0"]) == 0


def test_headers_come_from_a_file_and_a_line_that_is_none_is_named_without_its_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    headers = tmp_path / "headers.txt"
    headers.write_text("# for the door\nAuthorization Api-Key secret-of-mine\n")
    assert main(["bench", "ws://127.0.0.1:9", "--headers-file", str(headers)]) == 1
    told = capsys.readouterr().err
    assert "headers.txt, line 2: expected a header" in told
    assert "secret-of-mine" not in told


def test_the_key_in_the_file_opens_a_server_that_asks_for_one(tmp_path: Path) -> None:
    headers = tmp_path / "headers.txt"
    headers.write_text("Authorization: Api-Key robot-7-0123456789\n")
    output = tmp_path / "numbers.json"
    asked = ["--calls", "2", "--codec-rounds", "0", "--output", str(output), "--observation"]
    observation = tmp_path / "observation.msgpack"
    observation.write_bytes(msgpack_numpy.pack({"state": np.zeros(3, np.float32)}))
    keys = read_api_keys(environment={"RELAY_API_KEYS": "robot-7-0123456789"})
    with serving(EchoEngine(), api_keys=keys) as url:
        assert main(["bench", url, *asked, str(observation)]) == 1
        assert main(["bench", url, *asked, str(observation), "--headers-file", str(headers)]) == 0
    assert "robot-7" not in output.read_text()


def test_the_script_needs_no_more_than_the_client() -> None:
    script = (
        "import sys, runpy\n"
        f"runpy.run_path({str(EXAMPLE)!r})\n"
        "sys.exit(not {'torch', 'tyro', 'rich', 'yaml', 'matplotlib'}.isdisjoint(sys.modules))\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
