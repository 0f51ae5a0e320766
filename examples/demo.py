"""How long a call to a policy server takes from here, and where its time goes; needs nothing but the client.

    python examples/demo.py ws://gpu-box:8000
    python examples/demo.py wss://robots.example --headers-file key.txt --output numbers.json

Without an address, the one in WALLE_URL, for the model given by --model. `relay bench` does the same with more options.
"""

import argparse
import sys
from pathlib import Path

from websockets.exceptions import InvalidURI

import relay
from relay.bench.command import run
from relay.bench.parameters import Parameters
from relay.client.settings import policy_url


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", nargs="?", help="the server's address (default: WALLE_URL)")
    parser.add_argument("--model", default="pi05", help="fills {model} in WALLE_URL (default: pi05)")
    parser.add_argument("--calls", type=int, default=100, help="calls that count (default 100)")
    parser.add_argument("--warm-up", type=int, default=5, help="calls before them, which are left out (default 5)")
    parser.add_argument(
        "--codec", choices=list(relay.Codec.__members__), default="JPEG_Q90", help="how frames are sent"
    )
    parser.add_argument("--codec-rounds", type=int, default=10, help="calls under each codec compared; 0: none")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds to wait for each answer (default 60)")
    parser.add_argument("--interval", type=float, default=0.0, help="seconds between calls (default 0)")
    parser.add_argument("--robot", help="send this robot's keys, such as droid, where the server doesn't tell its own")
    parser.add_argument("--observation", type=Path, help="send this observation, a file in MessagePack")
    parser.add_argument("--headers-file", type=Path, help="file of headers, such as 'Authorization: Api-Key ...'")
    parser.add_argument("--output", type=Path, help="JSON file for all numbers")
    parser.add_argument("--plot", type=Path, help="picture file, such as bench.png")
    chosen = parser.parse_args(arguments)
    try:
        parameters = Parameters(
            url=chosen.url or policy_url(chosen.model),
            calls=chosen.calls,
            warm_up=chosen.warm_up,
            codec=relay.Codec[chosen.codec],
            codec_rounds=chosen.codec_rounds,
            timeout=chosen.timeout,
            interval=chosen.interval,
            robot=chosen.robot,
            observation=chosen.observation,
        )
    except KeyError as error:
        parser.error(error.args[0])
    except (ValueError, InvalidURI) as error:
        parser.error(str(error))
    return run(parameters, headers_file=chosen.headers_file, output=chosen.output, plot=chosen.plot)


if __name__ == "__main__":
    sys.exit(main())
