"""Arrays that travel together."""

from __future__ import annotations

import numpy as np
import torch

from relay.engine.staging import Field, Staging, carve, size_of

FIELDS: dict[str, Field] = {"ids": ((3, 5), torch.int64), "flags": ((7,), torch.bool), "noise": ((2, 2), torch.float32)}
FRAMES: Field = ((4, 2, 2, 3), torch.uint8)


def staging() -> Staging:
    return Staging(torch.device("cpu"), size_of(FIELDS), FRAMES)


def test_one_upload_carries_every_array_and_the_first_items_of_the_bulk() -> None:
    block = staging()
    staged = block.view(FIELDS)
    staged.host["ids"][:] = np.arange(15).reshape(3, 5)
    staged.host["flags"][:] = True
    staged.host["noise"][:] = 0.5
    block.bulk_host[:2] = 9
    block.upload(FIELDS, 2)
    assert staged.device["ids"].flatten().tolist() == list(range(15))
    assert staged.device["flags"].all()
    assert (staged.device["noise"] == 0.5).all()
    assert (block.bulk[:2] == 9).all()


def test_items_beyond_those_asked_for_stay_as_they_were() -> None:
    block = staging()
    block.bulk_host[:] = 9
    block.upload(FIELDS, 2)
    assert not block.bulk[2:].any()


def test_nothing_arrives_before_the_upload() -> None:
    block = staging()
    block.view(FIELDS).host["ids"][:] = 1
    assert not block.view(FIELDS).device["ids"].any()


def test_the_bulk_stays_where_it_is_for_other_arrays() -> None:
    block = staging()
    smaller: dict[str, Field] = {"ids": ((1,), torch.int64)}
    block.view(smaller).host["ids"][:] = 7
    block.bulk_host[0] = 9
    block.upload(smaller, 1)
    assert block.view(smaller).device["ids"].tolist() == [7]
    assert (block.bulk[0] == 9).all()


def test_carved_arrays_do_not_overlap() -> None:
    views = carve(torch.zeros(size_of(FIELDS), dtype=torch.uint8), FIELDS)
    views["ids"].fill_(-1)
    assert not views["flags"].any()
    assert not views["noise"].any()
