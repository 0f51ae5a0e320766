"""The demo policy's tokenizer: one piece per word of the task and one per state bin, in the format large models use."""

from __future__ import annotations

from pathlib import Path

from relay.demo.robot import PROMPTS
from relay.models.pi0.tokenizer import STATE_BINS

FIRST_STATE_BIN = 256
"""Ids 256 to 511 are the bins 0 to 255, so that a bin's embedding can start as a smooth function of its value."""


def write_tokenizer(path: Path) -> None:
    """Write `tokenizer.json`; special ids stand where Gemma has them."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = sorted({word for prompt in PROMPTS for word in prompt.split()})
    pieces = ["<pad>", "<eos>", "<bos>", "<unk>", "Task", "State", "Action", ":", ",", ";", "-", *words]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    vocabulary |= {str(state_bin): FIRST_STATE_BIN + state_bin for state_bin in range(STATE_BINS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Punctuation(behavior="isolated")]
    )
    tokenizer.save(str(path))
