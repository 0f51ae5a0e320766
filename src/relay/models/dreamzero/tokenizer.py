"""Instructions to token ids: put into their template, cleaned, and spelled out by UMT5's tokenizer.

The same steps in the same order as dreamzero: groot/vla/model/dreamzero/transform/dreamzero_cotrain.py (`collate`,
`HuggingfaceTokenizer`), but that nothing is ever cut off, and that an instruction is never evaluated as Python.
"""

from __future__ import annotations

import html
import re
from pathlib import Path
from typing import Any, Protocol

from relay.engine.weights import CheckpointError
from relay.models.dreamzero.config import TEXT_TOKENS
from relay.models.dreamzero.extra import imported
from relay.models.dreamzero.prompts import PLACE
from relay.protocol.errors import ObservationError

PAD, END = 0, 1
"""UMT5's ids of padding and of the end of a text."""

FILES = ("tokenizer.json", "spiece.model", "tokenizer.model")
PLACES = ("", "google/umt5-xxl", "umt5-xxl", "tokenizer")
"""Names of a tokenizer's file, and folders below the checkpoint's where it is looked for, in this order."""

_SHARE = 0.9
"""Least share of the network's token embedding that has pieces; UMT5's last few hundred rows have none."""

_REMEDY = "pass the tokenizer.json or spiece.model of google/umt5-xxl with --tokenizer FILE"


class Vocabulary(Protocol):
    """A tokenizer file, loaded."""

    def encode(self, text: str) -> list[int]:
        """Ids of a text, with the end's."""
        ...

    def piece(self, token: int) -> str:
        """What an id stands for, as the file has it."""
        ...


class PromptTokenizer:
    """Builds the token ids of instructions.

    Args:
        template: with `{p}` where the instruction goes.
        formalize: instructions lose their punctuation first.
    """

    def __init__(self, vocabulary: Vocabulary, template: str, *, formalize: bool = False) -> None:
        self.vocabulary = vocabulary
        self._template, self._formalize = template, formalize

    def __call__(self, instruction: str) -> tuple[int, ...]:
        """The ids of a whole prompt, with the end's and without padding.

        Raises:
            ObservationError: the prompt is too long, or the instruction holds a piece that ends a text.
        """
        text = self.text(instruction)
        tokens = self.vocabulary.encode(text)
        if len(tokens) > TEXT_TOKENS:
            times = self._template.count(PLACE)
            raise ObservationError(
                f"prompt: this instruction of {len(instruction)} characters, which stands "
                f"{'twice' if times == 2 else 'once'} in what the network reads, makes {len(tokens)} tokens; at most "
                f"{TEXT_TOKENS} are taken, so send a shorter one"
            )
        if any(token in (PAD, END) for token in tokens[:-1]):
            raise ObservationError("prompt holds a piece such as </s>, which ends a text; leave it out")
        return tuple(tokens)

    def text(self, instruction: str) -> str:
        """What is spelled out for an instruction."""
        if self._formalize:
            instruction = re.sub(r"[^\w\s]", "", instruction)
        return clean(self._template.replace(PLACE, instruction.lower()))


def clean(text: str) -> str:
    """Broken encodings mended, HTML's names resolved (twice, as some are doubly escaped), white space made single."""
    text = imported("ftfy").fix_text(text)
    return re.sub(r"\s+", " ", html.unescape(html.unescape(text)).strip()).strip()


def find_tokenizer(folder: Path) -> Path:
    """The tokenizer's file in a checkpoint folder.

    Raises:
        CheckpointError: there is none.
    """
    for place in PLACES:
        for name in FILES:
            if (folder / place / name).is_file():
                return folder / place / name
    raise CheckpointError(f"no tokenizer in {folder}; {_REMEDY}")


def load_vocabulary(path: Path, size: int) -> Vocabulary:
    """Read a tokenizer file by its suffix and see that it goes with the network.

    Args:
        size: rows of the text encoder's token embedding.

    Raises:
        CheckpointError: the file is missing, of an unknown kind, or another model's; or a package is missing.
    """
    imported("ftfy")
    if not path.is_file():
        raise CheckpointError(f"no tokenizer at {path}; {_REMEDY}")
    if path.suffix == ".json":
        vocabulary, count = _from_json(path)
    elif path.suffix == ".model":
        vocabulary, count = _from_sentencepiece(path)
    else:
        raise CheckpointError(f"{path.name} is not a tokenizer file; {_REMEDY}")
    if not _SHARE * size <= count <= size:
        raise CheckpointError(
            f"{path.name} has {count:,} pieces, but this network {size:,}: it is another model's tokenizer; {_REMEDY}"
        )
    if vocabulary.encode("")[-1:] != [END] or vocabulary.piece(END) != "</s>":
        raise CheckpointError(
            f"{path.name} does not end texts with </s> as number {END}: it is another model's tokenizer; {_REMEDY}"
        )
    return vocabulary


def _from_json(path: Path) -> tuple[Vocabulary, int]:
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exceptions
        raise CheckpointError(f"{path} is not a tokenizer.json: {error}; {_REMEDY}") from None
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return _Json(tokenizer), tokenizer.get_vocab_size()


class _Json:
    """A Hugging Face `tokenizer.json`."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=True).ids

    def piece(self, token: int) -> str:
        return self._tokenizer.id_to_token(token) or ""


def _from_sentencepiece(path: Path) -> tuple[Vocabulary, int]:
    from sentencepiece import SentencePieceProcessor

    try:
        model = SentencePieceProcessor(model_file=str(path))
    except (RuntimeError, OSError) as error:
        reason = " ".join(str(error).split()) or "it cannot be parsed"
        raise CheckpointError(f"{path} is not a SentencePiece model: {reason}; {_REMEDY}") from None
    return _SentencePiece(model), model.get_piece_size()


class _SentencePiece:
    """A SentencePiece `spiece.model`."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def encode(self, text: str) -> list[int]:
        return [*self._model.encode(text), END]

    def piece(self, token: int) -> str:
        return self._model.id_to_piece(token)
