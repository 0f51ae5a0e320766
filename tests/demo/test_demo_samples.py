"""Training samples: shapes, labels that fit the pictures, and exact repetition."""

from itertools import islice

import numpy as np
import pytest

from relay.demo.drawing import CAMERAS, OBJECTS, object_pixels, render
from relay.demo.robot import PROMPTS, actions_from_model, task_prompt
from relay.demo.samples import GRID, OUT_OF_VIEW, PATCH, Sample, expert_chunk, sample_stream
from relay.demo.tabletop import MAX_JOINT_STEP_RAD, Tabletop


@pytest.fixture(scope="module")
def samples() -> list[Sample]:
    return list(islice(sample_stream(np.random.default_rng(0)), 120))


def test_samples_have_the_documented_shapes(samples: list[Sample]) -> None:
    for sample in samples:
        assert (sample.frames.shape, sample.frames.dtype) == ((2, 224, 224, 3), np.uint8)
        assert (sample.state.shape, sample.state.dtype) == ((4,), np.float32)
        assert (sample.actions.shape, sample.actions.dtype) == ((16, 4), np.float32)
        assert (sample.cells.shape, sample.cells.dtype) == ((2, 5), np.int64)
        assert (sample.offsets.shape, sample.offsets.dtype) == ((2, 5, 2), np.float32)


def test_the_same_seed_gives_the_same_samples(samples: list[Sample]) -> None:
    again = islice(sample_stream(np.random.default_rng(0)), 20)
    for one, other in zip(samples, again, strict=False):
        assert np.array_equal(one.frames, other.frames)
        assert np.array_equal(one.actions, other.actions)


def test_another_robots_samples_differ_in_its_base_camera_alone(samples: list[Sample]) -> None:
    others = islice(sample_stream(np.random.default_rng(0), "cross"), 5)
    for one, other in zip(samples, others, strict=False):
        assert not np.array_equal(one.frames[0], other.frames[0])
        assert np.array_equal(one.frames[1], other.frames[1])
        assert np.array_equal(one.actions, other.actions)
        assert np.array_equal(one.cells[1], other.cells[1])


def test_the_prompt_names_the_labelled_objects(samples: list[Sample]) -> None:
    for sample in samples:
        assert sample.prompt == task_prompt(OBJECTS[sample.cube], OBJECTS[sample.plate])
    assert {sample.prompt for sample in samples} <= set(PROMPTS)


def test_cells_and_offsets_point_at_the_objects(samples: list[Sample]) -> None:
    in_view = np.stack([sample.cells for sample in samples]) != OUT_OF_VIEW
    assert 0.5 < in_view.mean() < 1.0
    for sample in samples:
        seen = sample.cells != OUT_OF_VIEW
        assert ((sample.cells[seen] >= 0) & (sample.cells[seen] < GRID * GRID)).all()
        assert np.abs(sample.offsets[seen]).max() <= 0.5
        assert not sample.offsets[~seen].any()


def test_an_object_is_painted_where_its_label_says() -> None:
    table = Tabletop(np.random.default_rng(11))
    x, y = object_pixels(table, CAMERAS[0])[OBJECTS.index("red")].astype(int)
    red, green, blue = render(table, CAMERAS[0])[y, x].tolist()
    assert red > 2 * max(green, blue)
    assert 0 <= y // PATCH * GRID + x // PATCH < GRID * GRID


def test_labels_are_what_the_undisturbed_expert_does() -> None:
    table = Tabletop(np.random.default_rng(2))
    steps = np.diff(actions_from_model(expert_chunk(table))[:, :3], axis=0)
    assert np.linalg.norm(steps, axis=1).max() < MAX_JOINT_STEP_RAD * 0.28


def test_labelling_leaves_the_table_as_it_was() -> None:
    table = Tabletop(np.random.default_rng(2))
    before = table.joints, dict(table.cubes), table.steps
    expert_chunk(table)
    assert (table.joints, table.cubes, table.steps) == before


def test_some_pictures_went_through_jpeg(samples: list[Sample]) -> None:
    backgrounds = np.stack([sample.frames[0, :20].reshape(-1, 3) for sample in samples])
    painted = np.array([len({tuple(pixel) for pixel in pixels.tolist()}) for pixels in backgrounds])
    assert 0.15 < np.mean(painted > 30) < 0.5
