"""The `relay` command: which subcommands there are. Each is imported when the command line is read, its work later."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line, the process's own by default; returns the exit code."""
    try:
        import rich  # noqa: F401
        import tyro
    except ModuleNotFoundError as missing:
        print(
            f"relay: the command line needs {missing.name}; install it with: pip install 'relay-robotics[cli]'",
            file=sys.stderr,
        )
        return 2

    from relay.cli.bench import Bench
    from relay.cli.check import Check
    from relay.cli.demo import Demo
    from relay.cli.parity import Parity
    from relay.cli.serve import Serve

    command: Serve | Demo | Bench | Check | Parity = tyro.extras.subcommand_cli_from_dict(
        {"serve": Serve, "demo": Demo, "bench": Bench, "check": Check, "parity": Parity},
        prog="relay",
        description=_DESCRIPTION,
        args=arguments,
        config=(tyro.conf.FlagCreatePairsOff, tyro.conf.EnumChoicesFromValues),
    )
    return command.run()


_DESCRIPTION = (
    "Robot-policy inference: serve a policy, check its checkpoint, or watch the built-in one drive its robot."
)


if __name__ == "__main__":
    sys.exit(main())
