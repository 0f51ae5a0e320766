"""Which request options this server can honour: the one place where an option is refused or given a default."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from difflib import get_close_matches

from relay.engine.adapter_folders import BASE
from relay.engine.base import PolicySpec
from relay.protocol.errors import ObservationError
from relay.protocol.options import Options
from relay.protocol.wording import clipped, quoted

SERVER_OPTIONS = frozenset({"deadline_ms"})
"""Options that the server itself answers for, whatever the engine."""

_WIRE_NAMES = {"adapter": "adapter_dir"}
"""What a request calls an option, where that differs from the field of `Options`."""

_OPTIONS = tuple(option.name for option in fields(Options))


def admit(
    options: Options,
    spec: PolicySpec,
    default_seed: int | None,
    *,
    adapters: Sequence[str] | None = None,
    name_adapters: bool = True,
) -> Options:
    """The options that the engine gets, with the server's default seed where the request leaves the noise open.

    Args:
        adapters: the names of those that the policy holds now; None leaves it to a policy that says it takes them.
        name_adapters: whether an unknown adapter is answered with the names of those the server holds.

    Raises:
        ObservationError: an option that this policy would have to ignore, or more denoising steps than allowed. A robot
            that ran without the adapter or the guidance it asked for would be worse than one that got no actions.
    """
    held = adapters if "adapter" in spec.supported_options else ()
    if options.adapter is not None and held is not None and options.adapter not in (*held, BASE if held else None):
        raise unknown_adapter(options.adapter, held, named=name_adapters)
    known = spec.supported_options | SERVER_OPTIONS
    for name in _OPTIONS:
        if getattr(options, name) is not None and name not in known:
            raise ObservationError(f"{name} is not an option of {spec.model}; it takes: {', '.join(sorted(known))}")
    most = max(50, 4 * spec.num_steps)
    if options.num_steps is not None and not 1 <= options.num_steps <= most:
        raise ObservationError(f"num_steps must be between 1 and {most}, got {options.num_steps}")
    if default_seed is not None and options.seed is None and options.noise is None and "seed" in known:
        return replace(options, seed=default_seed)
    return options


def option_keys(spec: PolicySpec) -> str:
    """The request keys of all options that a policy honours, for the header `Relay-Options`."""
    return ", ".join(sorted(_WIRE_NAMES.get(name, name) for name in spec.supported_options | SERVER_OPTIONS))


def unknown_adapter(name: str, held: Sequence[str], *, named: bool) -> ObservationError:
    """The refusal of an adapter that the server does not hold, with the names of those it does hold, if `named`."""
    near = get_close_matches(name, held, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    known = f"; this server holds: {clipped(', '.join(held), 2_048) or 'none'}{hint}" if named else ""
    return ObservationError(f"adapter {quoted(name)} is not loaded{known}")
