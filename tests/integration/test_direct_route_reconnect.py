"""A lost direct connection is made again from the first address on, and moves to the server's own once more."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from echo_engine import EchoEngine
from threaded_server import serving

from fault_proxy import FaultProxy, in_thread

sys.path.append(str(Path(__file__).parents[1] / "client"))

from each_client import CLIENTS, each_client

from free_ports import free_port


@pytest.mark.parametrize("name", CLIENTS)
def test_a_direct_connection_that_is_lost_begins_at_the_first_address_again(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WALLE_DIRECT", raising=False)
    with in_thread(FaultProxy(0)) as bypass:  # its target is known when the server is
        settings: dict[str, Any] = {"direct_url": bypass.url, "direct_port": free_port()}
        bypass._target = settings["direct_port"]
        with (
            serving(EchoEngine(), **settings) as url,
            in_thread(FaultProxy(int(url.rpartition(":")[2]))) as front,
            each_client(name, front.url, reconnect=True, direct=True) as client,
        ):
            for gaps in range(3):
                state = np.full(3, gaps, np.float32)
                np.testing.assert_array_equal(client.infer({"state": state})[0], state)
                assert client.client.route == "direct"
                assert (front.accepted, bypass.accepted, client.reconnects) == (gaps + 1, gaps + 1, gaps)
                bypass.cut()
                time.sleep(0.3)
