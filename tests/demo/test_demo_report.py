"""What a run leaves behind: complete numbers, a page that loads nothing from elsewhere, and moving pictures."""

import json
import re
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from expert_policy import ExpertPolicy, IdlePolicy
from PIL import Image

from relay.demo.animation import frames_of, webp
from relay.demo.charts import chunk_chart, latency_chart
from relay.demo.drawing import render_all
from relay.demo.episode import Episode, run_episode
from relay.demo.report import write_report
from relay.demo.summary import percentiles, results, summarize

SEEDS = [(0, 0), (0, 1), (0, 2)]


@pytest.fixture(scope="module")
def episodes() -> list[Episode]:
    """Two recorded successes and a failure that was not recorded."""
    policy = ExpertPolicy(SEEDS[:2], notes=("camera right_wrist_0_rgb is masked",))
    return [run_episode(policy, seed, record=True) for seed in SEEDS[:2]] + [run_episode(IdlePolicy(), SEEDS[2])]


@pytest.fixture(scope="module")
def folder(episodes: list[Episode], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report") / "new" / "folder"
    options = {"episodes": 3, "seed": 0, "prompt": "<script>"}
    page = write_report(folder, episodes, options=options, metadata={"model": "demo"}, first_frame_s=2.5)
    assert page == folder / "report.html"
    return folder


def test_results_hold_every_number(folder: Path, episodes: list[Episode]) -> None:
    numbers = json.loads((folder / "results.json").read_text())
    assert numbers["success_rate"] == pytest.approx(2 / 3, abs=1e-4)
    assert (numbers["successes"], numbers["first_frame_s"]) == (2, 2.5)
    for times in ("round_trip_ms", "server_ms"):
        assert set(numbers[times]) == {"p50", "p90", "p99"}
    assert numbers["bytes_per_request"] > 0
    assert numbers["options"]["seed"] == 0
    assert numbers["policy"] == {"model": "demo"}
    assert set(numbers["versions"]) == {"relay", "python", "numpy", "platform"}
    row = numbers["episodes"][1]
    assert row["seed"] == [0, 1]
    assert (row["prompt"], row["success"], row["steps"]) == (episodes[1].prompt, True, episodes[1].steps)
    assert row["requests"] == len(episodes[1].requests)
    assert row["round_trip_p50_ms"] > 0


def test_what_was_not_measured_is_null() -> None:
    idle = run_episode(IdlePolicy(), SEEDS[0])
    numbers = results([idle], {}, {}, float("nan"))
    assert numbers["server_ms"] == {"p50": None, "p90": None, "p99": None}
    assert numbers["mean_steps"] is None
    assert numbers["first_frame_s"] is None
    json.dumps(numbers, allow_nan=False)


def test_the_page_loads_nothing_from_elsewhere(folder: Path) -> None:
    page = (folder / "report.html").read_text()
    sources = re.findall(r"""(?:src|href)\s*=\s*["']?([^"'\s>]{1,30})""", page)
    assert sources
    assert all(source.startswith("data:") for source in sources)
    assert "url(" not in page
    assert "@import" not in page
    assert not re.search(r"https?:", page)
    assert "<script" not in page


def test_the_page_shows_recorded_episodes_and_lists_all(folder: Path, episodes: list[Episode]) -> None:
    page = (folder / "report.html").read_text()
    assert page.count("<article>") == 2
    assert "the first 2 of 3" in page
    assert page.count("<tr><td>") == 3
    assert "camera right_wrist_0_rgb is masked" in page
    assert "$" not in re.sub(r"base64,[^\"]*", "", page)


def test_an_ablated_run_says_so(episodes: list[Episode], tmp_path: Path) -> None:
    page = write_report(tmp_path, episodes[2:], options={"ablate": "cameras"}, metadata={}, first_frame_s=1.0)
    assert "deprived on purpose: <b>cameras</b>" in page.read_text()


def test_the_gif_shows_the_whole_episode(folder: Path, episodes: list[Episode]) -> None:
    with Image.open(folder / "episode.gif") as moving:
        assert moving.n_frames == episodes[0].steps + 1
        assert moving.info["loop"] == 0
        assert moving.info["duration"] == 100


def test_moving_pictures_hold_the_cameras_unchanged(episodes: list[Episode]) -> None:
    frames = frames_of(episodes[0])
    base, wrist = render_all(episodes[0].states[5])
    picture = np.asarray(frames[5])
    assert np.array_equal(picture[:224, -224:], base)
    assert np.array_equal(picture[-224:, -224:], wrist)
    with Image.open(BytesIO(webp(frames[:3]))) as moving:
        assert moving.n_frames == 3


def test_the_chunk_chart_has_a_line_per_plan_and_dimension(episodes: list[Episode]) -> None:
    chart = chunk_chart(episodes[0])
    assert chart.count('class="plan"') == 4 * len(episodes[0].requests)
    assert chart.count('class="done"') == 4
    assert "nan" not in chart


def test_the_latency_chart_does_without_server_times() -> None:
    chart = latency_chart([10.0, 11.0, 12.0], [float("nan")] * 3)
    assert 'class="round-trip"' in chart
    assert 'class="server"' not in chart


def test_percentiles_leave_out_what_is_unknown() -> None:
    assert percentiles([1.0, float("nan"), 3.0]).p50 == 2.0


def test_the_summary_counts_notes(episodes: list[Episode]) -> None:
    summary = summarize(episodes)
    asked = len(episodes[0].requests) + len(episodes[1].requests)
    assert summary.notes == {"camera right_wrist_0_rgb is masked": asked}
