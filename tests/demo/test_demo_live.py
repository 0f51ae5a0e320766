"""The live page: what it answers, and that it ends with the run."""

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from io import BytesIO

import numpy as np
import pytest
from PIL import Image

from relay.demo.live import LivePage
from relay.demo.tabletop import Tabletop

NO_PLAN = np.empty((0, 4), np.float32)


@pytest.fixture
def page() -> Iterator[LivePage]:
    with LivePage() as page:
        yield page


def get(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return answer.read()


def test_the_page_and_its_status(page: LivePage) -> None:
    page.status = "episode 1/10"
    assert b'<img src="/pictures"' in get(page.url)
    assert json.loads(get(page.url + "status")) == {"status": "episode 1/10"}


def test_the_page_loads_nothing_from_elsewhere(page: LivePage) -> None:
    assert b"http" not in get(page.url)


def test_pictures_follow_each_other(page: LivePage) -> None:
    table = Tabletop(np.random.default_rng(0))
    page.show(table, "put the red cube on the yellow plate", NO_PLAN)
    with urllib.request.urlopen(page.url + "pictures", timeout=10) as stream:
        for _ in range(2):
            assert stream.readline() == b"--picture\r\n"
            assert stream.readline() == b"Content-Type: image/jpeg\r\n"
            length = int(stream.readline().split()[1])
            assert stream.readline() == b"\r\n"
            assert Image.open(BytesIO(stream.read(length))).size == (688, 456)
            assert stream.readline() == b"\r\n"
            page.show(table, "put the red cube on the yellow plate", NO_PLAN)
    assert page.wait_for_viewer(0)


def test_other_paths_are_not_found(page: LivePage) -> None:
    with pytest.raises(urllib.error.HTTPError, match="404") as error:
        get(page.url + "etc/passwd")
    error.value.close()


def test_closing_frees_the_port() -> None:
    with LivePage() as page:
        port = int(page.url.rsplit(":", 1)[1].strip("/"))
    with LivePage(port) as again:
        assert again.url == page.url
