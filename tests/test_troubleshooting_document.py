"""docs/troubleshooting.md: every error text that it quotes can be found in the source."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import relay

PAGE = (Path(__file__).parents[1] / "docs" / "troubleshooting.md").read_text("utf-8")
QUOTED = [
    text
    for row in re.findall(r"^\| (`.*?`) \| ", PAGE, re.MULTILINE)
    for text in re.findall(r"`([^`]+)`(?:, |$)", row.partition(" | ")[0])
]


def _texts() -> list[str]:
    """Every string of the source that is no docstring, with a line feed for each value that is filled in."""
    texts: list[str] = []
    for file in Path(relay.__file__).parent.rglob("*.py"):
        tree = ast.parse(file.read_text("utf-8"))
        docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if id(node) in docstrings:
                continue
            if isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else "\n" for part in node.values]
                texts.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    return texts


TEXTS = _texts()


@pytest.mark.parametrize("quoted", QUOTED)
def test_the_quoted_text_is_in_the_source(quoted: str) -> None:
    pattern = re.compile(".*".join(map(re.escape, quoted.split("…"))), re.DOTALL)
    assert any(pattern.match(text) for text in TEXTS)


def test_the_page_quotes_texts_in_every_table() -> None:
    tables = len(re.findall(r"^\|---", PAGE, re.MULTILINE))
    assert tables == len(re.findall(r"^\|---.*\n\| `", PAGE, re.MULTILINE))
    assert len(QUOTED) == len(re.findall(r"`[^`]+`", "\n".join(re.findall(r"^\| (`.*?`) \| ", PAGE, re.MULTILINE))))
