"""`prompts.json`: made from a copy of the repository without running it, and checked by digest."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path

import pytest

from relay.engine.weights import CheckpointError
from relay.models.dreamzero import prompts
from relay.models.dreamzero.prompts import RELEASED, SOURCE, extract, make_prompts, read_prompts

CODE = """
raise SystemExit("this file was run")

def collate(features, mapping):
    for item in features:
        try:
            if views > 1 and item["embodiment_id"] == mapping[EmbodimentTag.AGIBOT.value]:
                text = "Robot " + item.lower() + " seen. Again " + item.lower()
            elif item["embodiment_id"] == mapping[EmbodimentTag.OXE_DROID.value]:
                text = (
                    "Droid "
                    + item.lower()
                    + " in braces {p}? "
                    + item.lower()
                )
            elif item["embodiment_id"] == mapping[EmbodimentTag.MECKA_HANDS.value]:
                text = "A human " + item.lower()
            elif is_detection == EmbodimentTag.YAM.value:
                count = 1 + 2
        except ValueError:
            if views > 1 and item["embodiment_id"] == mapping[EmbodimentTag.AGIBOT.value]:
                text = "Robot " + str(item).lower() + " seen. Again " + str(item).lower()

def apply_single(data):
    data["text"] = "something else"
    data["text_negative"] = "Blurry, dull."
"""


def test_the_texts_are_found_in_the_syntax_tree() -> None:
    assert extract(CODE) == {
        "agibot": "Robot {p} seen. Again {p}",
        "oxe_droid": "Droid {p} in braces {p}? {p}",
        "mecka_hands": "A human {p}",
        "negative": "Blurry, dull.",
    }


def test_two_texts_under_one_name_are_refused() -> None:
    with pytest.raises(CheckpointError, match="two texts for agibot"):
        extract(CODE.replace('str(item).lower() + " seen', 'str(item).lower() + " viewed'))


def test_what_is_no_python_is_refused() -> None:
    with pytest.raises(CheckpointError, match="cannot be read as Python"):
        extract("def collate(:")


@pytest.mark.parametrize("code", ["(" * 5000, "x = " + "-" * 200_000 + "1", "x = " + "[" * 50_000, "x = 'a'\0"])
def test_code_that_is_nested_too_deeply_or_no_text_is_refused(code: str) -> None:
    with pytest.raises(CheckpointError, match=f"^{SOURCE} cannot be read as Python: "):
        extract(code)


def test_a_sum_of_many_parts_is_put_together() -> None:
    letters = " + ".join("'a'" for _ in range(2000))
    code = f"if tag == EmbodimentTag.YAM.value:\n    text = item + {letters}\n"
    assert extract(code) == {"yam": "{p}" + "a" * 2000}


def repository(folder: Path, code: str) -> Path:
    (folder / SOURCE).parent.mkdir(parents=True)
    (folder / SOURCE).write_text(code, "utf-8")
    return folder


def digests(texts: dict[str, str]) -> dict[str, str]:
    return {name: sha256(text.encode()).hexdigest() for name, text in texts.items()}


def test_the_file_is_made_and_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts, "RELEASED", digests(extract(CODE)))
    path = tmp_path / "prompts.json"
    path.write_text(make_prompts(repository(tmp_path / "repository", CODE)), "utf-8")
    read = read_prompts(path, "agibot", prompts.RELEASED)
    assert read.template == "Robot {p} seen. Again {p}"
    assert read.negative == "Blurry, dull."


def test_texts_that_are_not_the_released_ones_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts, "RELEASED", {**digests(extract(CODE)), "agibot": "0" * 64})
    with pytest.raises(CheckpointError, match="the text for agibot is not the one the model was trained with"):
        make_prompts(repository(tmp_path / "repository", CODE))


def test_a_repository_that_lacks_a_text_or_the_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="has no text for xdof, yam, gr1_unified"):
        make_prompts(repository(tmp_path / "repository", CODE))
    with pytest.raises(CheckpointError, match=f"^no {SOURCE} in .*; take a copy of dreamzero's repository"):
        make_prompts(tmp_path / "elsewhere")


def test_the_released_texts_digests_are_those_of_the_specification() -> None:
    assert {name: digest[:8] for name, digest in RELEASED.items()} == {
        "oxe_droid": "fd51a858",
        "agibot": "50181f42",
        "xdof": "50181f42",
        "yam": "ab4215d5",
        "gr1_unified": "065ae17a",
        "mecka_hands": "065ae17a",
        "negative": "38191719",
    }


TEXTS = {"oxe_droid": "Robot {p} and {p}", "negative": "dull"}


def written(folder: Path, **changes: object) -> Path:
    path = folder / "prompts.json"
    path.write_text(json.dumps({"templates": {"oxe_droid": TEXTS["oxe_droid"]}, "negative": "dull", **changes}))
    return path


@pytest.mark.parametrize(
    ("changes", "embodiment", "told"),
    [
        ({"negative": "dull."}, "oxe_droid", "the text for negative is not the one the model was trained with"),
        ({"templates": {"oxe_droid": "Robot {p}"}}, "oxe_droid", "the text for oxe_droid is not the one"),
        ({"templates": {}}, "oxe_droid", "prompts.json: templates: oxe_droid is missing, expected text"),
        ({"negative": 3}, "oxe_droid", "prompts.json: negative is 3, expected text"),
        ({}, "lapa", "the released model has no text for lapa, only for oxe_droid; if this checkpoint"),
    ],
)
def test_a_file_that_is_not_the_models_is_refused(
    changes: dict[str, object], embodiment: str, told: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError) as error:
        read_prompts(written(tmp_path, **changes), embodiment, digests(TEXTS))
    assert told in str(error.value)


def test_a_template_without_a_place_for_the_instruction_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, templates={"oxe_droid": "Robot"})
    with pytest.raises(CheckpointError, match=r"no \{p\} where the instruction goes"):
        read_prompts(path, "oxe_droid", digests({**TEXTS, "oxe_droid": "Robot"}))


def test_a_missing_file_is_told_with_the_command_that_makes_it(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no prompts.json in .*relay check FOLDER --prompts-from DIR"):
        read_prompts(tmp_path / "prompts.json", "oxe_droid")
