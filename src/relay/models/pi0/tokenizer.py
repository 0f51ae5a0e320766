"""Prompts to token ids: π0's form, π0.5's form with the discretized state, and π0.5's form without it.

The texts are built as openpi builds them (openpi: src/openpi/models/tokenizer.py). Two file formats are read: a
SentencePiece `tokenizer.model` and a Hugging Face `tokenizer.json`. Knows nothing of images or networks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from relay.engine.base import Note
from relay.engine.weights import CheckpointError
from relay.protocol.errors import ObservationError

STATE_BINS = 256

_PALIGEMMA_SIZE = 257_152
_PALIGEMMA_IDS = {"\n": 108, " ": 235_248}
"""Rows of PaliGemma's token embedding, and ids that its vocabulary has and others of this size have not."""


class Vocabulary(Protocol):
    """A tokenizer file, loaded."""

    bos_id: int
    unknown_id: int | None

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, nothing added before or after."""
        ...

    def piece(self, token: int) -> str:
        """What an id stands for, as the file has it."""
        ...


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids without padding, and what the caller should know about them."""

    tokens: tuple[int, ...]
    notes: tuple[Note, ...] = ()


def load_vocabulary(path: Path) -> Vocabulary:
    """Read a tokenizer file by its suffix.

    Raises:
        CheckpointError: when the file is missing, of an unknown kind, or has no beginning-of-sequence id.
    """
    if not path.is_file():
        raise CheckpointError(f"no tokenizer at {path}; pass --tokenizer FILE (a tokenizer.model or tokenizer.json)")
    if path.suffix == ".json":
        return _JsonVocabulary(path)
    if path.suffix == ".model":
        return _SentencePieceVocabulary(path)
    raise CheckpointError(f"{path.name} is not a tokenizer file; expected tokenizer.model or tokenizer.json")


@dataclass(frozen=True, slots=True)
class PromptTokenizer:
    """Builds the token ids of one request.

    Attributes:
        max_tokens: longest prompt; the task text is shortened to fit, never the tail the model reads the state from.
        state_in_prompt: π0.5's usual form; False gives π0's form.
        raw: tokenize the task as it comes, a newline added unless it ends in one, as lerobot's π0 does.
        vocabulary_size: rows of the network's token embedding; no prompt may have a higher id.
    """

    vocabulary: Vocabulary
    max_tokens: int
    state_in_prompt: bool
    raw: bool = False
    vocabulary_size: int | None = None

    def check(self, state_dim: int = 0) -> None:
        """See that this tokenizer goes with the network.

        Args:
            state_dim: real width of the state, for which every prompt needs room.

        Raises:
            CheckpointError: it gives other ids than the network was trained with, or the state alone does not fit.
        """
        probe = "Task: , State: 0 1 2 3 4 5 6 7 8 9 -1;\nAction: " if self.state_in_prompt else "\n"
        ids = self.vocabulary.encode(probe)
        highest = max(self.vocabulary.bos_id, *ids)
        if self.vocabulary_size is not None and highest >= self.vocabulary_size:
            raise CheckpointError(
                f"the tokenizer gives the id {highest}, but this network has {self.vocabulary_size} tokens: "
                f"it is another model's tokenizer; {_REMEDY}"
            )
        if self.vocabulary.unknown_id in ids:
            raise CheckpointError(
                f"the tokenizer does not know every piece of {probe!r}, which all prompts hold: it is another model's "
                f"tokenizer; {_REMEDY}"
            )
        for text, expected in _PALIGEMMA_IDS.items() if self.vocabulary_size == _PALIGEMMA_SIZE else ():
            if self.vocabulary.encode(text) != [expected]:
                raise CheckpointError(
                    f"the tokenizer gives {text!r} the ids {self.vocabulary.encode(text)}, PaliGemma's gives "
                    f"{[expected]}: it is another model's tokenizer; {_REMEDY}"
                )
        if self.state_in_prompt:
            # The bins -1 and 255 are the longest in pieces and in digits.
            needed = 1 + max(len(self.vocabulary.encode(f"Task: {_tail(np.full(state_dim, end))}")) for end in (-2, 2))
            if needed > self.max_tokens:
                raise CheckpointError(
                    f"max_token_len is {self.max_tokens}, but {state_dim} state values need up to {needed} tokens "
                    "before any word of the task; write a larger max_token_len into relay.json"
                )

    def __call__(self, prompt: str, state: NDArray[np.floating[Any]] | None = None) -> Prompt:
        """Tokenize the task and, where the prompt holds it, the normalized state `(state_dim,)` of the real width."""
        task = prompt.removesuffix("\n") if self.raw else clean(prompt)
        if self.state_in_prompt:
            assert state is not None
            tail = _tail(state)
            tokens, note = self._fit(task, lambda text: self.vocabulary.encode(f"Task: {text}{tail}"))
        elif self.raw:
            tokens, note = self._fit(task, lambda text: self.vocabulary.encode(f"{text}\n"))
        else:
            # The newline that starts the answer is encoded by itself, as the reference does.
            newline = self.vocabulary.encode("\n")
            tokens, note = self._fit(task, lambda text: self.vocabulary.encode(text) + newline)
        notes = [Note(note, must_be_told=True)] if note else []
        if self.vocabulary.unknown_id in tokens:
            words = dict.fromkeys(task.split())
            unknown = [word[:32] for word in words if self.vocabulary.unknown_id in self.vocabulary.encode(word)]
            notes.append(Note(f"prompt holds words this policy never saw: {', '.join(map(repr, unknown[:8]))}"))
        if self.vocabulary_size is not None and max(tokens) >= self.vocabulary_size:
            raise ObservationError(
                f"prompt: {max(tokens)} is the id of a piece that this network does not have; leave out special "
                "pieces such as <image>"
            )
        return Prompt(tuple(tokens), tuple(notes))

    def _fit(self, task: str, encode: Callable[[str], list[int]]) -> tuple[list[int], str | None]:
        """Tokens with BOS for the longest beginning of `task` that fits."""
        room = self.max_tokens - 1

        def tokens(length: int) -> list[int]:
            return encode(task[:length])

        everything = tokens(len(task))
        if len(everything) <= room:
            return [self.vocabulary.bos_id, *everything], None
        least = len(tokens(0))
        if least > room:
            raise ObservationError(
                f"prompt: without any word of the task it needs {least + 1} tokens, the model takes {self.max_tokens}"
            )
        fits, too_long = 0, len(task)
        while too_long - fits > 1:
            middle = (fits + too_long) // 2
            fits, too_long = (middle, too_long) if len(tokens(middle)) <= room else (fits, middle)
        note = f"prompt truncated: it needs {len(everything) + 1} tokens, the model takes {self.max_tokens}; "
        note += f"the task text was cut to its first {fits} of {len(task)} characters"
        return [self.vocabulary.bos_id, *tokens(fits)], note


_REMEDY = "pass PaliGemma's with --tokenizer FILE"


def _tail(state: NDArray[np.floating[Any]]) -> str:
    return f", State: {' '.join(str(b) for b in discretize(state))};\nAction: "


def clean(prompt: str) -> str:
    """openpi's cleaning, for both models."""
    return prompt.strip().replace("_", " ").replace("\n", " ")


def discretize(state: NDArray[np.floating[Any]]) -> list[int]:
    """One of 256 bins over [-1, 1] per value; anything below -1 is bin -1, above 1 bin 255, as in openpi."""
    edges = np.linspace(-1, 1, STATE_BINS + 1)[:-1]
    return [int(b) for b in np.digitize(state, edges) - 1]


class _JsonVocabulary:
    """A Hugging Face `tokenizer.json`."""

    def __init__(self, path: Path) -> None:
        from tokenizers import Tokenizer

        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exceptions
            raise CheckpointError(f"{path} is not a tokenizer file: {error}") from None
        bos = self._tokenizer.token_to_id("<bos>")
        if bos is None:
            raise CheckpointError(f"{path.name} has no <bos> token; it is not a PaliGemma or Gemma tokenizer")
        self.bos_id: int = bos
        self.unknown_id: int | None = self._tokenizer.token_to_id("<unk>")

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def piece(self, token: int) -> str:
        return self._tokenizer.id_to_token(token) or ""


class _SentencePieceVocabulary:
    """A SentencePiece `tokenizer.model`."""

    def __init__(self, path: Path) -> None:
        from sentencepiece import SentencePieceProcessor

        try:
            self._model = SentencePieceProcessor(model_file=str(path))
        except (RuntimeError, OSError) as error:
            reason = " ".join(str(error).split()) or "it cannot be parsed"
            raise CheckpointError(f"{path} is not a SentencePiece model: {reason}") from None
        self.bos_id: int = self._model.bos_id()
        if self.bos_id < 0:
            raise CheckpointError(f"{path.name} has no beginning-of-sequence id; it is not a PaliGemma tokenizer")
        self.unknown_id: int | None = self._model.unk_id()

    def encode(self, text: str) -> list[int]:
        return self._model.encode(text)

    def piece(self, token: int) -> str:
        return self._model.id_to_piece(token)
