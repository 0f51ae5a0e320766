"""The instruction and the images' places as token ids."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest
from groot_words import write_tokenizer

from relay.engine.weights import CheckpointError
from relay.models.groot.prompt import MAX_TOKENS, PromptTokenizer, formalize, load_tokenizer
from relay.protocol.errors import ObservationError

VOCABULARY = Path(__file__).parents[3] / "vocab" / "qwen3.json"


@cache
def real() -> PromptTokenizer:
    return load_tokenizer(VOCABULARY)


@pytest.fixture
def tokenizer(tmp_path: Path) -> PromptTokenizer:
    return load_tokenizer(write_tokenizer(tmp_path / "tokenizer.json"))


def test_all_images_stand_before_the_text_in_one_turn_of_the_user(tokenizer: PromptTokenizer) -> None:
    tokens = tokenizer("pick up the bowl", [(32, 64), (64, 96)])
    first, second = [151_652, *[151_655] * 2, 151_653], [151_652, *[151_655] * 6, 151_653]
    assert tokens.dtype == np.int64
    assert tokens.tolist() == [151_644, 872, 198, *first, *second, 10, 11, 12, 14, 151_645, 198]


@pytest.mark.vocab
def test_the_real_vocabulary_gives_the_published_counts() -> None:
    tokens = real()("pick up the black bowl and place it on the plate", [(256, 256)] * 2)
    assert len(tokens) == 148
    assert tokens[:4].tolist() == [151_644, 872, 198, 151_652]
    assert tokens[-2:].tolist() == [151_645, 198]
    assert len(tokens[3 + 2 * 66 : -2]) == 11


@pytest.mark.vocab
def test_the_whole_prompt_is_what_the_chat_template_renders() -> None:
    from tokenizers import Tokenizer

    image = f"<|vision_start|>{'<|image_pad|>' * 88}<|vision_end|>"
    rendered = f"<|im_start|>user\n{image}{image}ouvre la 2e boîte, 请 now\n<|im_end|>\n"
    expected = Tokenizer.from_file(str(VOCABULARY)).encode(rendered, add_special_tokens=False).ids
    tokens = real()("ouvre la 2e boîte, 请 now\n", [(256, 352)] * 2)
    assert tokens.tolist() == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Pick up the BLACK bowl!", "pick up the black bowl"),
        ("it's the_cup, no. 3 (left)", "its the_cup no 3 left"),
        ("  two  spaces\tand\nlines ", "  two  spaces\tand\nlines "),
        ("Öffne die Tür – schnell", "öffne die tür  schnell"),
        ("拿起杯子。", "拿起杯子"),
        ("!?", ""),
    ],
)
def test_instructions_are_lower_cased_and_lose_their_punctuation(text: str, expected: str) -> None:
    assert formalize(text) == expected


def test_pieces_that_shape_a_conversation_are_refused(tokenizer: PromptTokenizer) -> None:
    with pytest.raises(ObservationError, match=r"prompt holds '<\|image_pad\|>'"):
        tokenizer("pick <|image_pad|> up", [(32, 32)])


def test_a_prompt_that_is_too_long_is_refused_whole(tokenizer: PromptTokenizer) -> None:
    fits = MAX_TOKENS - 5 - 2 - 64
    assert len(tokenizer("up " * fits, [(256, 256)])) == MAX_TOKENS
    with pytest.raises(ObservationError, match=f"the prompt has {MAX_TOKENS + 1} tokens, 64 of them for 1 frames"):
        tokenizer("up " * (fits + 1), [(256, 256)])


def test_another_models_tokenizer_is_refused_with_the_remedy(tmp_path: Path) -> None:
    file = write_tokenizer(tmp_path / "tokenizer.json", {"user": 873})
    with pytest.raises(CheckpointError, match=r"gives 'user' the ids \[873\], Qwen3-VL's gives \[872\].*--tokenizer"):
        load_tokenizer(file)


@pytest.mark.vocab
def test_gemmas_tokenizer_is_refused() -> None:
    with pytest.raises(CheckpointError, match="another model's tokenizer"):
        load_tokenizer(VOCABULARY.with_name("gemma.json"))


def test_missing_and_damaged_files_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no tokenizer at .*none\.json"):
        load_tokenizer(tmp_path / "none.json")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"is not a tokenizer\.json"):
        load_tokenizer(tmp_path / "tokenizer.json")
