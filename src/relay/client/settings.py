"""Where the policy servers are: environment variables, or a `.env` file in the working directory or above it.

Reads when asked, never at import, and leaves `os.environ` as it is.
"""

from __future__ import annotations

import itertools
import os
import urllib.parse
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from websockets.exceptions import InvalidURI

from relay.client.access import shown
from relay.client.peer import VLLM_PATH

URL_VARIABLE: Final = "WALLE_URL"
DIRECT_VARIABLE: Final = "WALLE_DIRECT"
URL_EXAMPLE: Final = "WALLE_URL=wss://gpu-box.example:8000/{model}"


def policy_url(model: str) -> str:
    """The address of the server for `model`, on the path of vLLM-Omni's robot endpoint.

    `{model}` in `WALLE_URL` becomes the model id, and the endpoint's path is appended unless the address ends so.

    Raises:
        KeyError: `WALLE_URL` is set nowhere; says where it was looked for.
        websockets.exceptions.InvalidURI: `WALLE_URL` is no address, or holds braces other than `{model}`.
        ValueError: `model` is no text or empty, or a `.env` file is not UTF-8.
    """
    if not isinstance(model, str) or not model:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"model must be a model id such as 'pi05', got {model!r}")
    url = _find(URL_VARIABLE, URL_EXAMPLE).replace("{model}", urllib.parse.quote(model, safe=""))
    try:
        parts = urllib.parse.urlsplit(url)
    except ValueError as error:
        raise InvalidURI(url, str(error)) from None
    if "{" in url or "}" in url:
        raise InvalidURI(shown(url), f"{URL_VARIABLE} may hold {{model}} and no other braces")
    path = parts.path.rstrip("/")
    if not path.endswith(VLLM_PATH):
        path += VLLM_PATH
    return urllib.parse.urlunsplit(parts._replace(path=path))


def direct_route_allowed() -> bool:
    """Whether direct routes may be taken: unless `WALLE_DIRECT` is 0.

    Raises:
        ValueError: it is neither 0 nor 1, or a `.env` file is not UTF-8.
    """
    value = _look_up(DIRECT_VARIABLE, _files()) or "1"
    if value not in ("0", "1"):
        raise ValueError(f"{DIRECT_VARIABLE} is {value!r}; expected 0 to stay away from direct routes, or 1")
    return value == "1"


def _find(name: str, example: str) -> str:
    directory, files = Path.cwd(), _files()
    value = _look_up(name, files)
    if value:
        return value
    found = f"; it is not in {', '.join(map(str, files))}" if files else ""
    raise KeyError(
        f"{name} is not set: looked in the environment and for a .env file in {directory} and the directories above it"
        f"{found}. Set it to the server's address, for example {example}"
    )


def _files() -> list[Path]:
    """The `.env` files in the working directory and above it, the nearest first."""
    directory = Path.cwd()
    return [file for parent in (directory, *directory.parents) if os.path.isfile(file := parent / ".env")]


def _look_up(name: str, files: Iterable[Path]) -> str | None:
    """The value from the environment, else from the first file that sets it; empty counts as not set."""
    places = itertools.chain((os.environ.get(name),), (_read(file).get(name) for file in files))
    return next((stripped for value in places if value and (stripped := value.strip())), None)


def _read(file: Path) -> dict[str, str | None]:
    from dotenv import dotenv_values  # here, because most programs never need it

    try:
        return dotenv_values(file, encoding="utf-8-sig")  # some editors begin UTF-8 with a byte order mark
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not UTF-8 text: {error.reason} at byte {error.start}") from None
