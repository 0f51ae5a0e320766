"""Which adapters a server holds: names, folders, and what changes while requests run."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import pytest

from relay.engine.adapter_folders import AdapterChoice, find_folders, parse_named
from relay.engine.adapter_store import AdapterStore


class Loaded:
    """What a test's reader makes of a folder: its only file's text."""

    def __init__(self, folder: Path) -> None:
        self.text = (folder / "weights").read_text()
        if self.text == "damaged":
            raise ValueError("the file is damaged")


def write(folder: Path, text: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "weights").write_text(text)
    return folder


def texts(store: AdapterStore[Loaded]) -> dict[str, str]:
    return {name: adapter.text for name in store.names if (adapter := store.get(name))}


def test_named_folders_and_those_of_the_root_are_held(tmp_path: Path) -> None:
    write(tmp_path / "root/fold", "a")
    write(tmp_path / "elsewhere", "b")
    store = AdapterStore(AdapterChoice({"pour": tmp_path / "elsewhere"}, tmp_path / "root"), Loaded)
    assert texts(store) == {"fold": "a", "pour": "b"}


def test_a_name_that_is_given_wins_over_the_root(tmp_path: Path) -> None:
    write(tmp_path / "root/fold", "root's")
    named = write(tmp_path / "elsewhere", "given")
    assert texts(AdapterStore(AdapterChoice({"fold": named}, tmp_path / "root"), Loaded)) == {"fold": "given"}


def test_one_folder_under_two_names_is_read_once(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", "a")
    store = AdapterStore(AdapterChoice({"one": folder, "two": folder}), Loaded)
    assert store.get("one") is store.get("two")
    assert len(store.adapters) == 1


def test_what_leads_out_of_the_root_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = tmp_path / "root"
    write(root / "inside", "a")
    outside = write(tmp_path / "outside", "secret")
    (root / "linked").symlink_to(outside)
    (root / "up").symlink_to("..")
    (root / "self").symlink_to(".")
    write(root / "file-linked", "x")
    (root / "file-linked/weights").unlink()
    (root / "file-linked/weights").symlink_to(outside / "weights")
    (root / "alias").symlink_to("inside")
    assert set(find_folders(AdapterChoice(root=root))) == {"inside", "alias"}
    assert {name for name in ("linked", "up", "self", "file-linked") if f"'{name}' leads out of" in caplog.text} == {
        "linked",
        "up",
        "self",
        "file-linked",
    }


def test_a_folder_outside_the_root_is_not_even_listed(tmp_path: Path) -> None:
    write(tmp_path / "outside/deep", "secret")
    (tmp_path / "root").mkdir()
    (tmp_path / "root/linked").symlink_to(tmp_path / "outside")
    _LISTED.clear()
    find_folders(AdapterChoice(root=tmp_path / "root"))
    assert str(tmp_path / "root") in _LISTED
    assert not any(path.startswith(str(tmp_path / "outside")) for path in _LISTED)


_LISTED: list[str] = []
sys.addaudithook(lambda event, given: _LISTED.append(str(given[0])) if event in ("os.listdir", "os.scandir") else None)


def test_links_in_a_circle_leave_the_others_alone(tmp_path: Path) -> None:
    write(tmp_path / "fold", "a")
    (tmp_path / "circle").symlink_to("circle")
    assert set(find_folders(AdapterChoice(root=tmp_path))) == {"fold"}


@pytest.mark.parametrize("name", ["a b", "x" * 65, "base", "é"])
def test_names_that_nobody_can_ask_for_are_left_out(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path / name, "a")
    assert not find_folders(AdapterChoice(root=tmp_path))
    assert "cannot be an adapter's name" in caplog.text


@pytest.mark.parametrize("name", ["", "..", "a/b", "base", "x" * 65])
def test_a_name_that_cannot_be_one_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="an adapter cannot be called"):
        AdapterChoice({name: tmp_path})


def test_names_and_paths_are_told_apart() -> None:
    assert parse_named(["a=/x/y=z", "b=c"]) == {"a": Path("/x/y=z"), "b": Path("c")}
    with pytest.raises(ValueError, match="--adapter fold: expected name=path"):
        parse_named(["fold"])
    with pytest.raises(ValueError, match="--adapter a is given twice"):
        parse_named(["a=b", "a=c"])


def test_choices_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--default-adapter fold needs --adapter or --adapter-root"):
        AdapterChoice(default="fold")
    with pytest.raises(ValueError, match="--merge-adapter takes one --adapter"):
        AdapterChoice({"a": tmp_path, "b": tmp_path}, merged=True)
    with pytest.raises(ValueError, match="is not a folder"):
        AdapterChoice(root=tmp_path / "nowhere")


def test_a_default_that_is_not_there_is_refused_with_those_that_are(tmp_path: Path) -> None:
    write(tmp_path / "fold", "a")
    with pytest.raises(ValueError, match="the default adapter 'pour' is not among fold"):
        AdapterStore(AdapterChoice(root=tmp_path, default="pour"), Loaded)


def test_a_rescan_brings_what_is_new_and_takes_what_is_gone(tmp_path: Path) -> None:
    write(tmp_path / "stays", "a")
    gone = write(tmp_path / "goes", "b")
    store = AdapterStore(AdapterChoice(root=tmp_path), Loaded)
    kept, in_flight = store.get("stays"), store.get("goes")
    (gone / "weights").unlink()
    gone.rmdir()
    write(tmp_path / "new", "c")
    store.rescan()
    assert texts(store) == {"new": "c", "stays": "a"}
    assert store.get("stays") is kept  # unchanged: not read again
    assert in_flight is not None
    assert in_flight.text == "b"


def test_a_rescan_reads_a_changed_folder_again(tmp_path: Path) -> None:
    write(tmp_path / "fold", "before")
    store = AdapterStore(AdapterChoice(root=tmp_path), Loaded)
    write(tmp_path / "fold", "afterwards")
    store.rescan()
    assert texts(store) == {"fold": "afterwards"}


def test_a_rescan_keeps_what_it_cannot_read_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path / "fold", "before")
    store = AdapterStore(AdapterChoice(root=tmp_path), Loaded)
    write(tmp_path / "fold", "damaged")
    write(tmp_path / "new", "damaged")
    with caplog.at_level(logging.ERROR):
        store.rescan()
    assert texts(store) == {"fold": "before"}
    assert "adapter fold is not loaded anew: the file is damaged" in caplog.text


def test_a_rescan_goes_on_behind_one_that_fails_unexpectedly(tmp_path: Path) -> None:
    write(tmp_path / "fold", "a")

    def read(folder: Path) -> Loaded:
        if folder.name == "broken":
            raise TypeError
        return Loaded(folder)

    store = AdapterStore(AdapterChoice(root=tmp_path), read)
    write(tmp_path / "broken", "b")
    write(tmp_path / "new", "c")
    store.rescan()
    assert texts(store) == {"fold": "a", "new": "c"}


def test_a_default_that_vanishes_stays(tmp_path: Path) -> None:
    folder = write(tmp_path / "fold", "a")
    store = AdapterStore(AdapterChoice(root=tmp_path, default="fold"), Loaded)
    (folder / "weights").unlink()
    folder.rmdir()
    store.rescan()
    assert texts(store) == {"fold": "a"}


def test_adapters_come_and_go_by_name(tmp_path: Path) -> None:
    first = write(tmp_path / "first", "a")
    store = AdapterStore(AdapterChoice({"first": first}, default="first"), Loaded)
    known = store.get("first")
    store.load("second", write(tmp_path / "second", "b"))
    store.load("first", first)
    assert store.get("first") is known
    assert texts(store) == {"first": "a", "second": "b"}
    store.rescan()  # keeps what was loaded by a call
    assert texts(store) == {"first": "a", "second": "b"}
    store.unload("second")
    assert store.names == ("first",)
    with pytest.raises(ValueError, match="adapter 'second' is not loaded"):
        store.unload("second")
    with pytest.raises(ValueError, match="'first' is the default adapter and stays"):
        store.unload("first")
    with pytest.raises(ValueError, match="the file is damaged"):
        store.load("first", write(tmp_path / "third", "damaged"))
    assert store.get("first") is known
