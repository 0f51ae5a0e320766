"""Instructions to ids: cleaned, lower-cased, put into their template, spelled out and never cut."""

from __future__ import annotations

from pathlib import Path

import pytest
from dreamzero_folders import tokenizer
from dreamzero_recipes import prompts
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer
from tokenizers import Tokenizer, models

from relay.engine.weights import CheckpointError
from relay.models.dreamzero.tokenizer import PromptTokenizer, clean, find_tokenizer, load_vocabulary
from relay.protocol.errors import ObservationError

pytestmark = pytest.mark.dreamzero

TWICE = "A Robot {p} Then it {p}"


def builder(template: str = TWICE, *, formalize: bool = False) -> PromptTokenizer:
    return PromptTokenizer(prompts().vocabulary, template, formalize=formalize)


def test_the_instruction_is_lower_cased_and_stands_at_each_place_of_the_template() -> None:
    assert builder().text("Pick UP the Fork.") == "A Robot pick up the fork. Then it pick up the fork."
    assert builder("Once {p}").text("Go") == "Once go"


def test_an_instruction_with_the_templates_own_mark_or_a_python_list_stays_as_it_is() -> None:
    assert builder().text("{p}") == "A Robot {p} Then it {p}"
    assert builder("Once {p}").text("['a', 'b']") == "Once ['a', 'b']"


@pytest.mark.parametrize(
    ("given", "cleaned"),
    [
        ("  a \n\t b\u3000c ", "a b c"),
        ("salt &amp;amp; pepper", "salt & pepper"),
        ("&lt;b&gt;", "<b>"),
        ("schÃ¶n", "schön"),
        ("&nbsp;a&nbsp;", "a"),
        ("the robot’s “hand”", 'the robot\'s "hand"'),
    ],
)
def test_the_whole_text_is_cleaned(given: str, cleaned: str) -> None:
    assert clean(given) == cleaned


def test_punctuation_goes_where_the_checkpoint_was_trained_so() -> None:
    assert builder("Once {p}", formalize=True).text("Pick, up: the_fork!") == "Once pick up the_fork"


def test_ids_are_those_of_the_text_with_the_end_behind() -> None:
    tokens = builder()("go")
    assert tokens[-1] == 1
    assert list(tokens) == tokenizer().encode("A Robot go Then it go").ids


def test_a_prompt_of_512_tokens_is_taken_and_one_more_is_refused() -> None:
    once = builder("{p}")
    assert len(once("x" * 510)) == 512
    with pytest.raises(
        ObservationError, match=r"of 511 characters, which stands once in .* makes 513 tokens; at most 512"
    ):
        once("x" * 511)


def test_a_piece_that_ends_a_text_is_refused() -> None:
    with pytest.raises(ObservationError, match="holds a piece such as </s>"):
        builder()("stop </s> here")


def test_a_sentencepiece_file_gives_the_pieces_and_the_end(tmp_path: Path) -> None:
    model = sentencepiece_model(tmp_path)
    vocabulary = load_vocabulary(model, SentencePieceProcessor(model_file=str(model)).get_piece_size())
    ids = vocabulary.encode("go on")
    assert ids[-1] == 1
    assert "".join(vocabulary.piece(token) for token in ids[:-1]) == "▁go▁on"


def sentencepiece_model(folder: Path) -> Path:
    (folder / "text.txt").write_text("go on robot and pick up the fork\n" * 50)
    SentencePieceTrainer.train(
        input=str(folder / "text.txt"),
        model_prefix=str(folder / "spiece"),
        vocab_size=60,
        hard_vocab_limit=False,
        pad_id=0,
        eos_id=1,
        unk_id=2,
        bos_id=-1,
        minloglevel=2,
    )
    return folder / "spiece.model"


@pytest.mark.parametrize(
    "place", ["tokenizer.json", "spiece.model", "google/umt5-xxl/tokenizer.json", "umt5-xxl/spiece.model"]
)
def test_the_tokenizer_is_found_in_the_usual_places(place: str, tmp_path: Path) -> None:
    file = tmp_path / place
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(b"")
    assert find_tokenizer(tmp_path) == file


def test_a_folder_without_one_is_told_what_to_pass(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no tokenizer in .*google/umt5-xxl with --tokenizer FILE"):
        find_tokenizer(tmp_path)


@pytest.mark.parametrize("size", [400, 1000])
def test_a_tokenizer_of_another_size_is_another_models(size: int, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    tokenizer().save(str(path))
    with pytest.raises(CheckpointError, match=f"has 500 pieces, but this network {size:,}: it is another model's"):
        load_vocabulary(path, size)


def test_a_tokenizer_that_does_not_end_its_texts_is_another_models(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    Tokenizer(models.WordLevel({f"w{number}": number for number in range(10)}, unk_token="w2")).save(str(path))
    with pytest.raises(CheckpointError, match="does not end texts with </s> as number 1"):
        load_vocabulary(path, 10)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("tokenizer.json", "is not a tokenizer.json"),
        ("spiece.model", "is not a SentencePiece model"),
        ("vocab.txt", "is not a tokenizer file"),
    ],
)
def test_a_damaged_or_strange_file_is_refused(name: str, told: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("{}")
    with pytest.raises(CheckpointError, match=told):
        load_vocabulary(tmp_path / name, 500)


def test_padding_and_cutting_that_the_file_asks_for_are_not_done(tmp_path: Path) -> None:
    made = Tokenizer.from_str(tokenizer().to_str())
    made.enable_truncation(4)
    made.enable_padding(length=32)
    made.save(str(tmp_path / "tokenizer.json"))
    ids = load_vocabulary(tmp_path / "tokenizer.json", 512).encode("longer than four")
    assert ids == tokenizer().encode("longer than four").ids
