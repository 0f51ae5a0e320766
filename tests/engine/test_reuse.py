"""The cache that is bounded by bytes."""

from __future__ import annotations

from relay.engine.reuse import SizedCache


def cache(limit: int) -> SizedCache[str, bytes]:
    return SizedCache(limit, len)


def test_what_was_put_is_there() -> None:
    kept = cache(10)
    kept.put("a", b"12345")
    assert kept.get("a") == b"12345"
    assert kept.get("b") is None


def test_what_was_used_longest_ago_goes_first() -> None:
    kept = cache(10)
    kept.put("a", b"12345")
    kept.put("b", b"12345")
    kept.get("a")
    kept.put("c", b"12345")
    assert kept.get("b") is None
    assert kept.get("a") is not None
    assert kept.nbytes == 10


def test_after_clearing_nothing_is_left() -> None:
    kept = cache(10)
    kept.put("a", b"12345")
    kept.clear()
    assert kept.get("a") is None
    assert kept.nbytes == 0


def test_a_value_larger_than_the_limit_is_not_kept() -> None:
    kept = cache(4)
    kept.put("a", b"12345")
    assert len(kept) == 0
    assert kept.nbytes == 0


def test_putting_a_key_again_replaces_its_value() -> None:
    kept = cache(10)
    kept.put("a", b"12345")
    kept.put("a", b"12")
    assert kept.get("a") == b"12"
    assert kept.nbytes == 2
