"""Poses of an end effector in the forms that GR00T checkpoints use, to matrices and back, many at once, in float64.

The forms are Isaac-GR00T's (gr00t/data/state_action/pose.py): three numbers of position, then the first two rows of the
rotation matrix, a rotation vector, or the whole 4x4 matrix instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Form = Literal["xyz_rot6d", "xyz_rotvec", "matrix"]

Array = NDArray[np.float64]


def compose(form: Form, start: Array, offsets: Array) -> Array:
    """Poses relative to `start` (width,) as absolute ones, (steps, width) each, in the same form."""
    place, turn = _FORMS[form].read(start)  # (3,), (3, 3)
    shifts, turns = _FORMS[form].read(offsets)  # (steps, 3), (steps, 3, 3)
    return _FORMS[form].write(place + shifts @ turn.T, turn @ turns)


@dataclass(frozen=True, slots=True)
class _Form:
    read: Callable[[Array], tuple[Array, Array]]
    write: Callable[[Array, Array], Array]


def _read_rows(poses: Array) -> tuple[Array, Array]:
    """Both rows made orthonormal by Gram-Schmidt, as a network's output is not."""
    first = _unit(poses[..., 3:6])
    second = poses[..., 6:9]
    second = _unit(second - (first * second).sum(-1, keepdims=True) * first)
    return poses[..., :3], np.stack([first, second, np.cross(first, second)], axis=-2)


def _write_rows(places: Array, turns: Array) -> Array:
    return np.concatenate([places, turns[..., 0, :], turns[..., 1, :]], axis=-1)


def _read_vector(poses: Array) -> tuple[Array, Array]:
    """Rodrigues' formula."""
    vectors = poses[..., 3:6]
    angles = np.linalg.norm(vectors, axis=-1)[..., None, None]
    x, y, z = np.moveaxis(vectors, -1, 0)
    none = np.zeros_like(x)
    cross = np.stack([none, -z, y, z, none, -x, -y, x, none], axis=-1).reshape(*vectors.shape[:-1], 3, 3)
    near = np.sinc(angles / np.pi)  # sin(a) / a, also at 0
    far = np.sinc(angles / (2 * np.pi)) ** 2 / 2  # (1 - cos(a)) / a^2
    return poses[..., :3], np.eye(3) + near * cross + far * (cross @ cross)


def _write_vector(places: Array, turns: Array) -> Array:
    """By the unit quaternion, whose largest part is computed first, so that half turns are exact too."""
    a, b, c = (turns[..., i, i] for i in range(3))
    squares = np.stack([1 + a + b + c, 1 + a - b - c, 1 - a + b - c, 1 - a - b + c], axis=-1)  # 4 w^2, 4 x^2, ...
    largest = squares.argmax(-1)[..., None]
    products = np.zeros((*turns.shape[:-2], 4, 4))  # 4 times the products of two parts
    for i, (p, q) in enumerate(_OFF_DIAGONAL):
        products[..., 0, i + 1] = products[..., i + 1, 0] = turns[..., q, p] - turns[..., p, q]
        j, k = p + 1, q + 1
        products[..., j, k] = products[..., k, j] = turns[..., q, p] + turns[..., p, q]
    for i in range(4):
        products[..., i, i] = squares[..., i]
    quaternion = _unit(np.take_along_axis(products, largest[..., None], axis=-2)[..., 0, :])
    quaternion = np.where(quaternion[..., :1] < 0, -quaternion, quaternion)
    sine = np.linalg.norm(quaternion[..., 1:], axis=-1, keepdims=True)
    angle = 2 * np.arctan2(sine, quaternion[..., :1])
    scale = np.where(sine > _TINY, angle / np.maximum(sine, _TINY), 2.0)
    return np.concatenate([places, scale * quaternion[..., 1:]], axis=-1)


_OFF_DIAGONAL = ((1, 2), (2, 0), (0, 1))
_TINY = 1e-12


def _read_matrix(poses: Array) -> tuple[Array, Array]:
    """The nearest rotation to the 3x3 part, since a network's output is none."""
    matrices = poses.reshape(*poses.shape[:-1], 4, 4)
    left, _, right = np.linalg.svd(matrices[..., :3, :3])
    left[..., -1] *= np.linalg.det(left @ right)[..., None]
    return matrices[..., :3, 3], left @ right


def _write_matrix(places: Array, turns: Array) -> Array:
    matrices = np.zeros((*places.shape[:-1], 4, 4))
    matrices[..., :3, :3], matrices[..., :3, 3], matrices[..., 3, 3] = turns, places, 1
    return matrices.reshape(*places.shape[:-1], 16)


_FORMS: Mapping[Form, _Form] = {
    "xyz_rot6d": _Form(_read_rows, _write_rows),
    "xyz_rotvec": _Form(_read_vector, _write_vector),
    "matrix": _Form(_read_matrix, _write_matrix),
}


def _unit(vectors: Array) -> Array:
    return vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)
