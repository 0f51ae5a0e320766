"""A tiny tokenizer with Qwen3-VL's ids for the pieces that shape a prompt, so that tests need no fetched vocabulary."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split

CONTROL = {
    "<|endoftext|>": 151_643,
    "<|im_start|>": 151_644,
    "<|im_end|>": 151_645,
    "<|vision_start|>": 151_652,
    "<|vision_end|>": 151_653,
    "<|image_pad|>": 151_655,
}
WORDS = {"?": 0, "pick": 10, "up": 11, "the": 12, "black": 13, "bowl": 14, "Pick": 15, "bowl!": 16}


def write_tokenizer(file: Path, changes: dict[str, int] | None = None) -> Path:
    """A `tokenizer.json` that knows a few words, each one token; all others are `?`."""
    ids = {**WORDS, "user": 872, "\n": 198, **CONTROL, **(changes or {})}
    tokenizer = Tokenizer(WordLevel(ids, unk_token="?"))
    tokenizer.pre_tokenizer = Split(Regex(r"\n|[^\s]+"), behavior="removed", invert=True)
    tokenizer.add_special_tokens(list(CONTROL))
    tokenizer.save(str(file))
    return file
