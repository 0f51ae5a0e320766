"""`relay check` on DreamZero folders."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path

import pytest
from dreamzero_folders import NEGATIVE, SMALL_IMAGE, TEMPLATES, write_checkpoint
from tiny_dreamzero import ENCODERS

from relay.cli.main import main
from relay.engine.weights import SafetensorsSource
from relay.models.dreamzero import inspection, prompts

pytestmark = pytest.mark.dreamzero

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("dreamzero"))


def check(capsys: Capture, folder: Path, *options: str) -> tuple[int, str]:
    """The exit code, and what was printed on either stream."""
    code = main(["check", str(folder), *options])
    told = capsys.readouterr()
    return code, told.out + told.err


def test_a_folder_that_would_start_is_told_with_code_0_and_no_tensor_is_read(
    folder: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(SafetensorsSource, "read")
    code, told = check(capsys, folder)
    assert code == 0
    assert "model        DreamZero" in told
    assert "exterior_image_1_left  observation/exterior_image_0_left  bottom left" in told
    assert "no problems: relay serve dreamzero would start" in told


def test_memory_actions_and_the_sample_are_told(folder: Path, capsys: Capture) -> None:
    assert main(["check", str(folder), "--json", "--prompt", "Go"]) == 0
    sections = json.loads(capsys.readouterr().out)["sections"]
    memory = sections["Memory"]["rows"]
    assert [row["served in"] for row in memory] == ["bfloat16", "float32"]
    assert {"all weights", "a session", "work", "with one session"} < memory[0].keys()
    assert sections["Actions"]["rows"][0] == {
        "key": "joint_position",
        "numbers": 7,
        "network gives": "offsets from the state",
    }
    text = TEMPLATES["oxe_droid"].replace("{p}", "go")
    assert f"tokens from '{text}'" in sections["What the model sees: prompt"]["remarks"][0]


def test_the_picture_that_the_network_sees_is_written(folder: Path, capsys: Capture, tmp_path: Path) -> None:
    code, _ = check(capsys, folder, "--output", str(tmp_path))
    assert code == 0
    assert (tmp_path / "frames.png").is_file()


def test_options_of_other_models_are_refused(folder: Path, capsys: Capture) -> None:
    code, told = check(capsys, folder, "--robot", "droid")
    assert code == 2
    assert "--robot is not an option of dreamzero; its own are --embodiment, --cameras" in told


def test_the_camera_set_changes_the_clients_keys(folder: Path, capsys: Capture) -> None:
    code, told = check(capsys, folder, "--cameras", "droid")
    assert code == 0
    assert "exterior_image_2_left  observation/exterior_image_2_left  bottom right" in told


def test_tensors_that_do_not_fit_are_listed(capsys: Capture, tmp_path: Path) -> None:
    text = {**ENCODERS["text"], "vocab_size": 550}
    write_checkpoint(tmp_path, settings={"encoders": {**ENCODERS, "image": SMALL_IMAGE, "text": text}})
    code, told = check(capsys, tmp_path)
    assert code == 1
    assert "problem: the checkpoint's tensors do not fit a DreamZero network of these sizes:" in told
    assert "wrong shape: action_head.text_encoder.token_embedding.weight is (512, 64), expected (550, 64)" in told


def test_prompts_are_made_from_a_copy_of_the_repository(
    capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_checkpoint(tmp_path / "checkpoint")
    (folder / "prompts.json").unlink()
    code, told = check(capsys, folder)
    assert code == 1
    assert "problem: no prompts.json in" in told
    texts = {"oxe_droid": TEMPLATES["oxe_droid"], "negative": NEGATIVE}
    released = {name: sha256(text.encode()).hexdigest() for name, text in texts.items()}
    for module in (prompts, inspection):
        monkeypatch.setattr(module, "RELEASED", released)
    source = tmp_path / "repository" / prompts.SOURCE
    source.parent.mkdir(parents=True)
    before, between, after = TEMPLATES["oxe_droid"].split("{p}")
    assert after == ""
    source.write_text(
        f"if tag == EmbodimentTag.OXE_DROID.value:\n    text = {before!r} + p + {between!r} + p\n"
        f"data['text_negative'] = {NEGATIVE!r}\n"
    )
    code, told = check(capsys, folder, "--prompts-from", str(tmp_path / "repository"))
    assert code == 0
    assert f"wrote {folder / 'prompts.json'}" in told
    code, told = check(capsys, folder, "--prompts-from", str(tmp_path / "repository"))
    assert (code, f"{folder / 'prompts.json'} is complete already" in told) == (0, True)
    code, told = check(capsys, folder, "--prompts-from", str(tmp_path / "nowhere"))
    assert code == 2
    assert "take a copy of dreamzero's repository" in told
    written = (folder / "prompts.json").read_text()
    (folder / "prompts.json").write_text("{}")
    code, told = check(capsys, folder, "--prompts-from", str(tmp_path / "repository"))
    assert (code, (folder / "prompts.json").read_text()) == (2, "{}")
    assert "prompts.json is there and says something else; --force replaces it" in told
    code, _ = check(capsys, folder, "--force", "--prompts-from", str(tmp_path / "repository"))
    assert (code, (folder / "prompts.json").read_text()) == (0, written)


@pytest.mark.parametrize("config", [None, "[", '{"type": "pi05"}'])
def test_no_prompts_are_written_into_a_folder_that_is_none_of_dreamzeros(
    config: str | None, capsys: Capture, tmp_path: Path
) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    before = sorted(tmp_path.iterdir())
    code, told = check(capsys, tmp_path, "--prompts-from", str(tmp_path))
    assert code == 2
    assert f"--prompts-from: {tmp_path} is not a DreamZero checkpoint, so nothing was written" in told
    assert sorted(tmp_path.iterdir()) == before


def test_prompts_that_cannot_be_written_whole_leave_the_folder_as_it_was(
    capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(place: Path, target: Path) -> Path:
        raise OSError(f"no room for {target.name}")

    folder = write_checkpoint(tmp_path)
    before = {file: file.read_bytes() for file in folder.iterdir() if file.is_file()}
    monkeypatch.setattr(prompts, "make_prompts", lambda repository: "{}")
    monkeypatch.setattr(Path, "replace", full)
    code, told = check(capsys, folder, "--force", "--prompts-from", str(tmp_path))
    assert (code, "no room for prompts.json" in told) == (2, True)
    assert {file: file.read_bytes() for file in folder.iterdir() if file.is_file()} == before


def test_a_complete_relay_json_is_written(capsys: Capture, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path)
    before = json.loads((folder / "relay.json").read_text())
    code, _ = check(capsys, folder, "--write")
    assert code == 0
    assert json.loads((folder / "relay.json").read_text()) == {
        **before,
        "embodiment": "oxe_droid",
        "cameras": "roboarena",
    }
