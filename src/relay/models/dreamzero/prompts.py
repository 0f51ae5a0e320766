"""The sentences that instructions are put into, and the one that guidance pushes away from.

They are data of the released model and stand in `prompts.json` beside its weights, made from the user's own copy of the
model's repository by `make_prompts`; this project holds their digests only. The repository's code is read as a syntax
tree and never run.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import cast

from relay.engine.json_entries import entry, read_json
from relay.engine.weights import CheckpointError

PROMPTS_FILE = "prompts.json"
SOURCE = "groot/vla/model/dreamzero/transform/dreamzero_cotrain.py"
"""Where the texts stand in dreamzero's repository (functions `collate` and `apply_single`)."""

NEGATIVE = "negative"
PLACE = "{p}"
"""Stands in a template where the instruction goes."""

RELEASED: Mapping[str, str] = {
    "oxe_droid": "fd51a8582811ad637dcbd8b23ad6ff484a94798143d325b44cb5c459ac2ce7eb",
    "agibot": "50181f429aebd5e671b8895b6a854af7eb26a26e0c902ef267c24929455386a1",
    "xdof": "50181f429aebd5e671b8895b6a854af7eb26a26e0c902ef267c24929455386a1",
    "yam": "ab4215d527473b677d01896bfb85dcd0e056cadf72f5618f9a053a1034c9f320",
    "gr1_unified": "065ae17ae256cbfcc492c71521f4873bb7ea41d4e9b9d7e1e2726b01f6641f2b",
    "mecka_hands": "065ae17ae256cbfcc492c71521f4873bb7ea41d4e9b9d7e1e2726b01f6641f2b",
    NEGATIVE: "38191719adbfd23b3ea32e43dd75423a39d2455b0944b86cfbe82e43e6c0ff25",
}
"""SHA-256 of each text in UTF-8, by embodiment."""

_REMEDY = "make it with relay check FOLDER --prompts-from DIR, where DIR is your copy of dreamzero's repository"


@dataclass(frozen=True, slots=True)
class Prompts:
    """The texts of one embodiment.

    Attributes:
        template: with `{p}` where the instruction goes.
    """

    template: str
    negative: str


def read_prompts(path: Path, embodiment: str, digests: Mapping[str, str] = RELEASED) -> Prompts:
    """Read `prompts.json`.

    Args:
        digests: what the texts must be, by name.

    Raises:
        CheckpointError: it is missing or damaged, has no template for this embodiment, or a text is another.
    """
    if not path.is_file():
        raise CheckpointError(f"no prompts.json in {path.parent}; {_REMEDY}")
    content = read_json(path)
    templates = entry(content, "templates", dict, path.name)
    negative = entry(content, NEGATIVE, str, path.name)
    if embodiment not in digests:
        known = ", ".join(name for name in digests if name != NEGATIVE)
        raise CheckpointError(
            f"the released model has no text for {embodiment}, only for {known}; if this checkpoint was trained with "
            "one, write its SHA-256 into relay.json, under 'prompts'"
        )
    template = entry(templates, embodiment, str, f"{path.name}: templates")
    for name, text in ((embodiment, template), (NEGATIVE, negative)):
        _verify(name, text, digests, path.name)
    if PLACE not in template:
        raise CheckpointError(f"{path.name}: the template of {embodiment} has no {PLACE} where the instruction goes")
    return Prompts(template, negative)


def make_prompts(repository: Path) -> str:
    """The content of a `prompts.json`, from a copy of dreamzero's repository.

    Raises:
        CheckpointError: the repository's file is missing or cannot be read, or its texts are not the released model's.
    """
    source = repository / SOURCE
    if not source.is_file():
        raise CheckpointError(f"no {SOURCE} in {repository}; take a copy of dreamzero's repository")
    try:
        code = source.read_text("utf-8", "replace")
    except OSError as error:
        raise CheckpointError(f"{source} cannot be read: {error.strerror}") from None
    texts = extract(code)
    missing = [name for name in RELEASED if name not in texts]
    if missing:
        raise CheckpointError(f"{source} has no text for {', '.join(missing)}; take the repository as it was released")
    for name in RELEASED:
        _verify(name, texts[name], RELEASED, str(source))
    content = {NEGATIVE: texts[NEGATIVE], "templates": {name: texts[name] for name in RELEASED if name != NEGATIVE}}
    return json.dumps(content, indent=2) + "\n"


def extract(code: str) -> dict[str, str]:
    """The texts in a file of the repository by name: what is put together for an embodiment, and what is negative.

    Raises:
        CheckpointError: it is no Python, or has two texts under one name.
    """
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError) as error:
        raise CheckpointError(f"{SOURCE} cannot be read as Python: {error}") from None
    except (RecursionError, MemoryError):  # which of them depends on the release of Python
        raise CheckpointError(f"{SOURCE} cannot be read as Python: it is nested too deeply") from None
    texts: dict[str, str] = {}
    for name, text in (*_templates(tree), *_negatives(tree)):
        if texts.setdefault(name, text) != text:
            raise CheckpointError(f"{SOURCE} has two texts for {name}; take the repository as it was released")
    return texts


def _templates(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Of every `if` that asks for an embodiment, the text that its branch puts together around the instruction."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.If):
            continue
        tags = [
            part.value.attr.lower()
            for part in ast.walk(node.test)
            if isinstance(part, ast.Attribute) and part.attr == "value" and isinstance(part.value, ast.Attribute)
        ]
        made = [line.value for line in node.body if isinstance(line, ast.Assign) and isinstance(line.value, ast.BinOp)]
        if len(tags) == 1 and len(made) == 1:
            text = "".join(_pieces(made[0]))
            if PLACE in text and text.replace(PLACE, ""):
                yield tags[0], text


def _pieces(node: ast.expr) -> Iterator[str]:
    """The literal parts of a sum, and `{p}` for whatever else is in it; a sum of any length."""
    ahead = [node]
    while ahead:
        node = ahead.pop()
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            ahead += [node.right, node.left]
        else:
            yield node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else PLACE


def _negatives(tree: ast.AST) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Subscript)
            and isinstance(node.targets[0].slice, ast.Constant)
            and node.targets[0].slice.value == "text_negative"
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            yield NEGATIVE, cast("str", node.value.value)


def _verify(name: str, text: str, digests: Mapping[str, str], place: str) -> None:
    digest = sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
    if digest != digests[name]:
        raise CheckpointError(
            f"{place}: the text for {name} is not the one the model was trained with (SHA-256 {digest[:12]}..., "
            f"expected {digests[name][:12]}...); {_REMEDY}"
        )
