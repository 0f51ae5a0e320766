"""Steps of looking at a folder that may fail, so that one look tells everything that is wrong. Knows no model."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


class Attempts:
    """Runs steps that may fail and keeps what they said.

    Args:
        errors: kinds of errors that are kept; others go on.
    """

    def __init__(self, *errors: type[Exception]) -> None:
        self._errors = errors
        self._said: list[str] = []

    def __call__(
        self, step: Callable[_Arguments, _Result], *args: _Arguments.args, **kwargs: _Arguments.kwargs
    ) -> _Result | None:
        try:
            return step(*args, **kwargs)
        except self._errors as error:
            self._said.append(str(error))
        return None

    @property
    def problems(self) -> tuple[str, ...]:
        """What went wrong, in the order of the steps."""
        return tuple(self._said)
