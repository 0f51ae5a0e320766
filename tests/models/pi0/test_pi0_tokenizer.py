"""Prompts to token ids."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from relay.demo.vocabulary import write_tokenizer
from relay.engine.base import Note
from relay.models.pi0.configurations import find_configuration
from relay.models.pi0.tokenizer import PromptTokenizer, Vocabulary, clean, discretize, load_vocabulary
from relay.models.pi0.weights import CheckpointError
from relay.protocol.errors import ObservationError


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    path = tmp_path_factory.mktemp("vocabulary") / "tokenizer.json"
    write_tokenizer(path)
    return load_vocabulary(path)


class Characters:
    """One id per character, so that lengths are easy to reason about."""

    bos_id = 2
    unknown_id = None

    def encode(self, text: str) -> list[int]:
        return [ord(character) for character in text]


def spell(tokens: tuple[int, ...]) -> str:
    return "".join(chr(token) for token in tokens[1:])


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (-1.0, 0),
        (-1.0000001, -1),
        (0.0, 128),
        (0.0078125, 129),
        (1.0, 255),
        (9.0, 255),
    ],
)
def test_state_bins_are_openpis(value: float, expected: int) -> None:
    assert discretize(np.array([value], np.float32)) == [expected]


def test_prompts_are_cleaned_as_openpi_does() -> None:
    assert clean("  pick_up\nthe fork ") == "pick up the fork"


def test_the_state_is_written_into_the_prompt() -> None:
    prompt = PromptTokenizer(Characters(), 200, True)("pick up the fork", np.array([0.0, -0.977], np.float32))
    assert spell(prompt.tokens) == "Task: pick up the fork, State: 128 2;\nAction: "
    assert prompt.tokens[0] == 2
    assert prompt.notes == ()


def test_without_a_state_the_prompt_ends_in_a_newline() -> None:
    assert spell(PromptTokenizer(Characters(), 48, False)("pick up the fork").tokens) == "pick up the fork\n"


def test_a_raw_prompt_is_tokenized_as_it_comes_with_one_newline() -> None:
    raw = PromptTokenizer(Characters(), 48, False, raw=True)
    assert spell(raw(" pick_up the fork").tokens) == " pick_up the fork\n"
    assert raw("pick up the fork\n").tokens == raw("pick up the fork").tokens


def test_a_piece_that_the_network_does_not_have_is_refused_before_it_gets_there() -> None:
    tokenizer = PromptTokenizer(Characters(), 48, False, vocabulary_size=128)
    tokenizer.check()
    with pytest.raises(ObservationError, match="prompt: 233 is the id of a piece that this network does not have"):
        tokenizer("café")


def test_another_networks_tokenizer_is_refused_at_the_start() -> None:
    with pytest.raises(CheckpointError, match="gives the id 116, but this network has 64 tokens"):
        PromptTokenizer(Characters(), 48, True, vocabulary_size=64).check()


class Few(Characters):
    """Knows no digits."""

    unknown_id = 3

    def encode(self, text: str) -> list[int]:
        return [3 if character.isdigit() else ord(character) for character in text]


def test_a_tokenizer_that_does_not_know_what_every_prompt_holds_is_refused() -> None:
    PromptTokenizer(Few(), 48, False).check()
    with pytest.raises(CheckpointError, match=r"does not know every piece of 'Task: .*pass PaliGemma's with"):
        PromptTokenizer(Few(), 200, True).check()


class AlmostGemma(Characters):
    """Another vocabulary of PaliGemma's size."""

    def __init__(self, newline: int, space: int) -> None:
        self._ids = {"\n": newline, " ": space}

    def encode(self, text: str) -> list[int]:
        return [self._ids.get(character, 1000) for character in text]


@pytest.mark.parametrize(("newline", "space", "text"), [(107, 235_248, "107"), (108, 236_743, "236743")])
def test_a_network_of_paligemmas_size_takes_paligemmas_tokenizer_only(newline: int, space: int, text: str) -> None:
    PromptTokenizer(AlmostGemma(108, 235_248), 200, True, vocabulary_size=257_152).check()
    PromptTokenizer(AlmostGemma(newline, space), 200, True, vocabulary_size=300_000).check()
    with pytest.raises(CheckpointError, match=rf"the ids \[{text}\], PaliGemma's gives \["):
        PromptTokenizer(AlmostGemma(newline, space), 200, True, vocabulary_size=257_152).check()


def test_a_limit_that_the_state_alone_may_exceed_is_refused_at_the_start() -> None:
    needed = 1 + len("Task: , State: 255 255 255;\nAction: ")
    PromptTokenizer(Characters(), needed, True).check(3)
    with pytest.raises(CheckpointError, match=f"max_token_len is {needed - 1}, but 3 state values need up to {needed}"):
        PromptTokenizer(Characters(), needed - 1, True).check(3)


def test_a_prompt_never_exceeds_the_limit_even_without_its_task() -> None:
    state = np.array([2.0, 2.0], np.float32)
    needed = 1 + len("Task: , State: 255 255;\nAction: ")
    assert len(PromptTokenizer(Characters(), needed, True)("pick", state).tokens) == needed
    with pytest.raises(ObservationError, match=f"it needs {needed} tokens, the model takes {needed - 1}"):
        PromptTokenizer(Characters(), needed - 1, True)("pick", state)


def test_a_long_task_is_cut_before_the_state_and_the_caller_is_told() -> None:
    prompt = PromptTokenizer(Characters(), 100, True)("x" * 3000, np.zeros(3, np.float32))
    text = spell(prompt.tokens)
    assert len(prompt.tokens) == 100
    assert text.startswith("Task: xxx")
    assert text.endswith(", State: 128 128 128;\nAction: ")
    assert "prompt truncated" in prompt.notes[0].text
    assert prompt.notes[0].must_be_told


def test_the_demo_vocabulary_has_one_piece_per_word_and_bin(vocabulary: Vocabulary) -> None:
    prompt = PromptTokenizer(vocabulary, 48, True)("put the red cube on the yellow plate", np.zeros(4, np.float32))
    assert len(prompt.tokens) == 21
    assert [token for token in prompt.tokens if token >= 256] == [256 + 128] * 4
    assert prompt.notes == ()


def test_words_outside_the_vocabulary_are_named_to_the_caller(vocabulary: Vocabulary) -> None:
    prompt = PromptTokenizer(vocabulary, 48, True)("put the green banana on the plate", np.zeros(4, np.float32))
    assert prompt.notes == (Note("prompt holds words this policy never saw: 'banana'"),)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("absent.json", "no tokenizer at"),
        ("vocab.txt", "not a tokenizer file"),
        ("other.json", "other.json is not a tokenizer file"),
        ("other.model", "other.model is not a SentencePiece model"),
    ],
)
def test_a_file_that_is_no_tokenizer_is_refused(tmp_path: Path, name: str, message: str) -> None:
    for other in ("vocab.txt", "other.json", "other.model"):
        (tmp_path / other).write_text("{}")
    with pytest.raises(CheckpointError, match=message):
        load_vocabulary(tmp_path / name)


def test_a_sentencepiece_file_is_read(tmp_path: Path) -> None:
    import sentencepiece

    corpus = tmp_path / "corpus.txt"
    corpus.write_text("pick up the fork and put it on the plate\n" * 50)
    options = {"pad_id": 0, "eos_id": 1, "bos_id": 2, "unk_id": 3, "add_dummy_prefix": False, "minloglevel": 2}
    sentencepiece.SentencePieceTrainer.train(
        input=str(corpus), model_prefix=str(tmp_path / "tokenizer"), vocab_size=22, **options
    )
    vocabulary = load_vocabulary(tmp_path / "tokenizer.model")
    assert vocabulary.bos_id == 2
    assert 3 not in vocabulary.encode("put the fork on the plate")


@pytest.fixture(scope="module")
def gemma() -> Vocabulary:
    return load_vocabulary(Path(__file__).parents[3] / "vocab" / "gemma.json")


@pytest.mark.vocab
def test_a_pi0_prompt_has_the_reference_ids(gemma: Vocabulary) -> None:
    prompt = PromptTokenizer(gemma, 48, False)("pick up the fork")
    assert prompt.tokens == (2, 18075, 908, 573, 24943, 108)


@pytest.mark.vocab
def test_lerobots_form_has_the_same_ids_for_a_plain_prompt(gemma: Vocabulary) -> None:
    prompt = PromptTokenizer(gemma, 48, False, raw=True)("pick up the fork")
    assert prompt.tokens == (2, 18075, 908, 573, 24943, 108)


@pytest.mark.vocab
def test_a_pi05_prompt_without_state_has_the_form_of_pi0(gemma: Vocabulary) -> None:
    configuration = find_configuration("pi05_libero")
    tokenizer = PromptTokenizer(gemma, configuration.max_token_len, configuration.state_in_prompt)
    assert tokenizer("pick up the fork", np.zeros(8)).tokens == (2, 18075, 908, 573, 24943, 108)


@pytest.mark.vocab
def test_the_gemma_vocabulary_goes_with_a_released_network(gemma: Vocabulary) -> None:
    PromptTokenizer(gemma, 200, True, vocabulary_size=257_152).check()


@pytest.mark.vocab
def test_a_pi05_prompt_has_the_reference_ids(gemma: Vocabulary) -> None:
    state = np.array([0.001, -0.976, 1.0, -1.0], np.float32)  # bins 128 3 255 0
    tokens = PromptTokenizer(gemma, 200, True)("pick up the fork", state).tokens
    task, bins = (
        "7071 235292 4788 908 573 24943 235269",
        "235274 235284 235321 235248 235304 235248 235284 235308 235308",
    )
    head, tail = f"2 {task} 3040 235292 235248 {bins}", "235248 235276 235289 108 4022 235292 235248"
    assert tokens == tuple(int(token) for token in f"{head} {tail}".split())


@pytest.mark.vocab
def test_a_state_below_the_range_takes_two_tokens(gemma: Vocabulary) -> None:
    assert gemma.encode(" 255 -1 -1") == [235248, 235284, 235308, 235308, 728, 235274, 728, 235274]


@pytest.mark.vocab
def test_a_long_task_keeps_the_tail_that_the_model_reads_the_state_from(gemma: Vocabulary) -> None:
    prompt = PromptTokenizer(gemma, 200, True)("pick up the fork and " * 150, np.zeros(14, np.float32))
    assert len(prompt.tokens) <= 200
    assert prompt.tokens[-5:] == (235289, 108, 4022, 235292, 235248)
    assert "prompt truncated" in prompt.notes[0].text
    assert prompt.notes[0].must_be_told
