"""The instruction and the images' places to token ids, as Qwen3-VL's chat template renders one turn of the user.

All images stand before the text; there is no system turn and nothing after the user's (Isaac-GR00T:
gr00t/model/gr00t_n1d7/processing_gr00t_n1d7.py). Knows no pixels.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from relay.engine.weights import CheckpointError
from relay.models.groot.images import TOKEN_SIDE
from relay.protocol.errors import ObservationError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TURN_START, TURN_END = 151_644, 151_645
VISION_START, VISION_END, IMAGE = 151_652, 151_653, 151_655
USER, NEWLINE = 872, 198

MAX_TOKENS = 4_096
"""Longest prompt, images included. The reference knows no bound; this one keeps a wrong frame or a book for an
instruction from taking the device's memory. The usual prompt has 150 to 550."""

_CONTROL = range(151_643, 151_657)
"""Ids of the pieces that shape a conversation, which no instruction may hold."""

_PROBE = {"\n": [NEWLINE], "user": [USER], "<|im_start|>": [TURN_START], "<|im_end|>": [TURN_END]} | {
    "<|vision_start|>": [VISION_START],
    "<|vision_end|>": [VISION_END],
    "<|image_pad|>": [IMAGE],
}


def load_tokenizer(path: Path) -> PromptTokenizer:
    """Read a Hugging Face `tokenizer.json` and see that it is Qwen3-VL's.

    Raises:
        CheckpointError: the file is missing or damaged, or another model's.
    """
    from tokenizers import Tokenizer

    if not path.is_file():
        raise CheckpointError(f"no tokenizer at {path}; {_REMEDY}")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exceptions
        raise CheckpointError(f"{path} is not a tokenizer.json: {error}; {_REMEDY}") from None
    for text, expected in _PROBE.items():
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        if ids != expected:
            raise CheckpointError(
                f"{path.name} gives {text!r} the ids {ids}, Qwen3-VL's gives {expected}: it is another model's "
                f"tokenizer; {_REMEDY}"
            )
    return PromptTokenizer(tokenizer)


_REMEDY = "pass the tokenizer.json of nvidia/Cosmos-Reason2-2B or Qwen/Qwen3-VL-2B-Instruct with --tokenizer FILE"


class PromptTokenizer:
    """Builds the token ids of one request."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def __call__(self, text: str, sizes: Sequence[tuple[int, int]]) -> NDArray[np.int64]:
        """The ids of a whole prompt, (n,).

        Args:
            text: the instruction, formalized if the checkpoint wants that.
            sizes: (height, width) in pixels of each image as the vision tower takes it, in the prompt's order.

        Raises:
            ObservationError: the text holds a piece that shapes the conversation, or the prompt is too long.
        """
        words = self._tokenizer.encode(text, add_special_tokens=False).ids
        control = next((token for token in words if token in _CONTROL), None)
        if control is not None:
            piece = self._tokenizer.id_to_token(control)
            raise ObservationError(f"prompt holds {piece!r}, which marks parts of a conversation; leave it out")
        images = [image_tokens(*size) for size in sizes]
        check_length(images, len(words))
        ids = [TURN_START, USER, NEWLINE]
        for count in images:
            ids += [VISION_START, *[IMAGE] * count, VISION_END]
        return np.array([*ids, *words, TURN_END, NEWLINE], np.int64)

    def piece(self, token: int) -> str:
        """What a token stands for."""
        return self._tokenizer.decode([token], skip_special_tokens=False)


def check_length(images: Sequence[int], words: int = 0) -> None:
    """Refuse a prompt that is too long; nothing is ever cut.

    Args:
        images: tokens of each image.
        words: tokens of the instruction.
    """
    total = sum(images) + text_tokens(len(images), words)
    if total > MAX_TOKENS:
        raise ObservationError(
            f"the prompt has {total} tokens, {sum(images)} of them for {len(images)} frames, and at most {MAX_TOKENS} "
            "are taken; send a shorter instruction, or frames whose sides differ less"
        )


def text_tokens(images: int, words: int) -> int:
    """Tokens of a prompt without those of its images: three before them, two around each, the words, two behind."""
    return 3 + 2 * images + words + 2


def image_tokens(height: int, width: int) -> int:
    """Tokens of an image of this size in the vision tower."""
    return height * width // TOKEN_SIDE**2


def formalize(text: str) -> str:
    """Lower case, and nothing but letters, digits, underscores and white space, of any script."""
    return re.sub(r"[^\w\s]", "", text.lower())
