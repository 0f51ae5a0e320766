"""`relay serve`'s flags about adapters: what they choose, and that a fault in them ends it at once with code 2."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from relay.cli.main import main
from relay.cli.serve_file import read_serve_file
from relay.engine.adapter_folders import AdapterChoice
from relay.models import registry
from relay.server import app


@pytest.fixture
def choice_of(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What `relay serve demo` with these flags would load its policy with."""
    pytest.importorskip("torch")

    def choice_of(*flags: str) -> AdapterChoice:
        offers: list[Any] = []
        loaded: list[AdapterChoice] = []
        monkeypatch.setattr(app, "serve", lambda policies, settings: offers.extend(policies.values()))
        monkeypatch.setattr(registry, "load", lambda model, *, adapters, **others: loaded.append(adapters))
        assert main(["serve", "demo", *flags]) == 0
        offers[0].load(lambda phase, share: None)
        return loaded[0]

    return choice_of


def test_without_flags_the_demo_holds_its_own_adapter(choice_of: Any) -> None:
    assert {name: folder.name for name, folder in choice_of().named.items()} == {"demo-cross": "demo-cross"}
    assert choice_of().default is None


def test_adapters_that_are_chosen_take_the_place_of_the_demos_own(choice_of: Any, tmp_path: Path) -> None:
    assert set(choice_of("--adapter", "fold=/a").named) == {"fold"}
    assert not choice_of("--adapter-root", str(tmp_path)).named


def test_another_checkpoint_has_no_adapter_by_itself(choice_of: Any, tmp_path: Path) -> None:
    assert not choice_of("--checkpoint", str(tmp_path)).any


def test_the_demos_own_adapter_can_be_the_default(choice_of: Any) -> None:
    assert choice_of("--default-adapter", "demo-cross").default == "demo-cross"


def test_every_flag_is_part_of_the_choice(choice_of: Any, tmp_path: Path) -> None:
    assert choice_of(
        *("--adapter", "fold=/a", "--adapter", "pour=/b=c", "--adapter-root", str(tmp_path)),
        *("--default-adapter", "fold", "--adapter-memory", "0.5"),
    ) == AdapterChoice({"fold": Path("/a"), "pour": Path("/b=c")}, tmp_path, "fold", memory_bytes=2**29)


def test_the_only_adapter_can_be_merged(choice_of: Any) -> None:
    assert choice_of("--adapter", "fold=/a", "--merge-adapter").merged


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--adapter", "fold"], "--adapter fold: expected name=path"),
        (["--adapter", "../x=/a"], "an adapter cannot be called '../x'"),
        (["--adapter", "a=/a", "--adapter", "a=/b"], "--adapter a is given twice"),
        (["--adapter-root", "nowhere"], "--adapter-root nowhere is not a folder"),
        (["--checkpoint", ".", "--default-adapter", "fold"], "--default-adapter fold needs --adapter"),
        (["--merge-adapter"], "--merge-adapter takes one --adapter"),
        (["--adapter-memory", "0"], "--adapter-memory must be above 0 GiB"),
    ],
)
def test_a_fault_is_named_and_ends_it_with_2(flags: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    assert main(["serve", "demo", *flags]) == 2
    assert says in capsys.readouterr().err


def test_folders_in_a_file_are_relative_to_it(tmp_path: Path) -> None:
    file = tmp_path / "robots.yaml"
    file.write_text("models: {demo: {adapter: [fold=adapters/fold, pour=/pour], adapter_root: all}}\n")
    options = read_serve_file(file).policies["demo"][1]
    assert options.adapter == (f"fold={tmp_path / 'adapters/fold'}", "pour=/pour")
    assert options.adapter_root == tmp_path / "all"
