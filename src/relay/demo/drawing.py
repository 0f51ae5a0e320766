"""The robot's two cameras: pinhole projection and polygons painted back to front with Pillow. Knows no policy."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from relay.demo.tabletop import (
    CUBE_HALF_M,
    CUBES,
    LINK_M,
    PLATE_RADIUS_M,
    PLATES,
    SHOULDER_HEIGHT_M,
    TOOL_LENGTH_M,
    Tabletop,
)

Colour: TypeAlias = "tuple[int, int, int]"
Array: TypeAlias = "NDArray[np.float64]"

IMAGE_SIZE = 224
CAMERAS = ("base_0_rgb", "left_wrist_0_rgb")
OBJECTS = (*PLATES, *CUBES)

CUBE_COLOURS: dict[str, Colour] = {"red": (205, 45, 40), "green": (40, 160, 70), "blue": (45, 85, 205)}
PLATE_COLOURS: dict[str, Colour] = {"yellow": (235, 200, 60), "purple": (140, 70, 165)}
BACKGROUND: Colour = (88, 98, 112)
TILE_COLOURS: tuple[Colour, Colour] = ((190, 171, 143), (196, 178, 150))
SHADOW: Colour = (150, 134, 110)
DARK_METAL: Colour = (70, 74, 82)
UPPER_ARM: Colour = (236, 236, 238)
FOREARM: Colour = (222, 223, 228)
FINGER: Colour = (52, 55, 62)
FINGER_HALF_M = np.array([0.008, 0.006, 0.03])

NEAREST_M = 0.02  # what comes closer to the lens is left out


@dataclass(frozen=True, slots=True)
class Camera:
    """A pinhole camera.

    Attributes:
        eye: position (3,) in metres.
        axes: rows right, down and forward, (3, 3).
        focal: focal length in half picture widths.
    """

    eye: Array
    axes: Array
    focal: float

    @classmethod
    def looking_at(cls, eye: Sequence[float], at: Sequence[float], up: Sequence[float], focal: float) -> Camera:
        """A camera at `eye` with `at` in the middle of its picture."""
        position = np.array(eye, float)
        forward = np.array(at, float) - position
        forward /= np.linalg.norm(forward)
        right = np.cross(forward, np.array(up, float))
        right /= np.linalg.norm(right)
        return cls(position, np.stack([right, -np.cross(right, forward), forward]), focal)

    def project(self, points: Array, size: int) -> tuple[Array, Array]:
        """Pixel coordinates (n, 2) of points (n, 3) in a square picture of `size` pixels, and depths (n,) in metres."""
        seen = (points - self.eye) @ self.axes.T
        depth = np.maximum(seen[:, 2], NEAREST_M)
        pixels = size * (0.5 + 0.5 * self.focal * seen[:, :2] / depth[:, None])
        return pixels, seen[:, 2]


def render(table: Tabletop, camera: str, size: int = IMAGE_SIZE) -> NDArray[np.uint8]:
    """One camera's picture, uint8 RGB (size, size, 3)."""
    view = camera_of(table, camera)
    image = Image.new("RGB", (size, size), BACKGROUND)
    painter = Painter(ImageDraw.Draw(image), view, size)
    _draw_table(painter, table)
    _add_cubes(painter, table)
    if camera == "base_0_rgb":
        _add_arm(painter, table)
    _add_gripper(painter, table)
    painter.finish()
    return np.asarray(image)


def render_all(table: Tabletop) -> NDArray[np.uint8]:
    """Both cameras' pictures in the order of `CAMERAS`, uint8 (2, 224, 224, 3)."""
    return np.stack([render(table, camera) for camera in CAMERAS])


def object_pixels(table: Tabletop, camera: str, size: int = IMAGE_SIZE) -> Array:
    """Pixel coordinates (5, 2) of the objects' centres in the order of `OBJECTS`, whether in view or not."""
    plates = [(x, y, 0.0) for x, y in table.plates.values()]
    cubes = [(x, y, height + CUBE_HALF_M) for x, y, height in table.cubes.values()]
    return camera_of(table, camera).project(np.array(plates + cubes), size)[0]


def camera_of(table: Tabletop, camera: str) -> Camera:
    """The named camera where it stands now: one beside the table, one carried by the tool.

    The base camera stands where the table's robot has it. The wrist camera keeps the table's orientation, like the
    gripper.
    """
    if camera == "base_0_rgb":
        return _BASE_CAMERAS[table.robot]
    x, y, z = table.tool
    return Camera.looking_at((x - 0.085, y, z + 0.21), (x + 0.005, y, z - 0.02), (1.0, 0.0, 0.0), 0.85)


_BASE_CAMERAS = {
    "front": Camera.looking_at((0.92, 0.0, 0.62), (0.29, 0.0, 0.045), (0.0, 0.0, 1.0), 2.25),
    "cross": Camera.looking_at((-0.34, 0.0, 0.62), (0.29, 0.0, 0.045), (0.0, 0.0, 1.0), 2.8),
}


class Painter:
    """Paints flat things at once and solid ones later, farthest first."""

    def __init__(self, draw: ImageDraw.ImageDraw, camera: Camera, size: int) -> None:
        self.draw = draw
        self._camera = camera
        self._size = size
        self._solids: list[tuple[float, Callable[[], None]]] = []

    def flat(self, corners: Array, colour: Colour) -> None:
        pixels, depth = self._camera.project(corners, self._size)
        self._polygon(pixels, depth, colour)

    def tiles(self, corners: Array, tiles: Sequence[tuple[list[int], Colour]]) -> None:
        """Many polygons that share their corners, each left out alone where it comes too close."""
        pixels, depth = self._camera.project(corners, self._size)
        for indices, colour in tiles:
            self._polygon(pixels[indices], depth[indices], colour)

    def add_box(self, centre: Array, half: Array, colour: Colour) -> None:
        """A box along the world's axes, shaded by face."""
        pixels, depth = self._camera.project(_BOX_CORNERS * half + centre, self._size)
        if depth.min() <= NEAREST_M:
            return
        corner_pixels = _pixels(pixels)
        outside = (self._camera.eye - centre) * _FACE_SIGNS > half
        faces = [
            ([corner_pixels[i] for i in corners], _shade(colour, shade))
            for axis, sign, corners, shade in _BOX_FACES
            if outside[sign, axis]
        ]
        self.add(centre, partial(self._faces, faces))

    def add_limb(self, start: Array, end: Array, radius: float, colour: Colour) -> None:
        """A round bar between two points."""
        pixels, depth = self._camera.project(np.stack([start, end]), self._size)
        if depth.min() <= 0.03:
            return
        width = max(2, int(self._size * self._camera.focal * radius / depth.mean()))
        self.add((start + end) / 2, partial(self._limb, _pixels(pixels), width, colour))

    def finish(self) -> None:
        """Paint the solid things, farthest first."""
        for _, paint in sorted(self._solids, key=lambda solid: -solid[0]):
            paint()

    def add(self, centre: Array, paint: Callable[[], None]) -> None:
        self._solids.append((float(np.linalg.norm(centre - self._camera.eye)), paint))

    def _polygon(self, pixels: Array, depth: Array, colour: Colour) -> None:
        if depth.min() > NEAREST_M:
            self.draw.polygon(_pixels(pixels), fill=colour)

    def _faces(self, faces: list[tuple[list[tuple[float, float]], Colour]]) -> None:
        for corners, colour in faces:
            self.draw.polygon(corners, fill=colour)

    def _limb(self, ends: list[tuple[float, float]], width: int, colour: Colour) -> None:
        self.draw.line(ends, fill=colour, width=width)
        for x, y in ends:
            r = width / 2
            self.draw.ellipse((x - r, y - r, x + r, y + r), fill=colour)


_BOX_CORNERS = np.array([(x, y, z) for x in (-1, 1) for y in (-1, 1) for z in (-1, 1)], float)
_FACE_SIGNS = np.array([[-1.0], [1.0]])
# axis, sign (0 is the negative side), corners, brightness; the underside is never seen
_BOX_FACES = (
    (0, 0, (0, 1, 3, 2), 0.75),
    (0, 1, (4, 5, 7, 6), 0.85),
    (1, 0, (0, 1, 5, 4), 0.7),
    (1, 1, (2, 3, 7, 6), 0.8),
    (2, 1, (1, 3, 7, 5), 1.0),
)


def _draw_table(painter: Painter, table: Tabletop) -> None:
    painter.tiles(_TILE_CORNERS, _TILES)
    for name, (x, y) in table.plates.items():
        colour = PLATE_COLOURS[name]
        painter.flat(_CIRCLE * PLATE_RADIUS_M + (x, y, 0.0), colour)
        painter.flat(_CIRCLE * (0.72 * PLATE_RADIUS_M) + (x, y, 0.0), _shade(colour, 0.86))


_ANGLES = np.linspace(0, 2 * math.pi, 18, endpoint=False)
_CIRCLE = np.stack([np.cos(_ANGLES), np.sin(_ANGLES), np.zeros(18)], 1)
_TILE_CORNERS = np.array([(x, y, 0.0) for x in np.linspace(-0.08, 0.55, 5) for y in np.linspace(-0.3, 0.3, 5)])
_TILES = [
    ([i * 5 + j, i * 5 + j + 1, (i + 1) * 5 + j + 1, (i + 1) * 5 + j], TILE_COLOURS[(i + j) % 2])
    for i in range(4)
    for j in range(4)
]


def _add_cubes(painter: Painter, table: Tabletop) -> None:
    for name, (x, y, height) in table.cubes.items():
        painter.flat(_SQUARE * (CUBE_HALF_M * 1.15) + (x, y, 0.0), SHADOW)
        painter.add_box(np.array([x, y, height + CUBE_HALF_M]), np.full(3, CUBE_HALF_M), CUBE_COLOURS[name])


_SQUARE = np.array([(-1, -1, 0), (1, -1, 0), (1, 1, 0), (-1, 1, 0)], float)


def _add_arm(painter: Painter, table: Tabletop) -> None:
    yaw, shoulder_angle, _ = table.joints
    shoulder = np.array([0.0, 0.0, SHOULDER_HEIGHT_M])
    elbow_reach = LINK_M * math.cos(shoulder_angle)
    elbow = shoulder + np.array(
        [elbow_reach * math.cos(yaw), elbow_reach * math.sin(yaw), LINK_M * math.sin(shoulder_angle)]
    )
    wrist = _above(table, TOOL_LENGTH_M)
    painter.add_box(
        np.array([0, 0, SHOULDER_HEIGHT_M / 2]), np.array([0.045, 0.045, SHOULDER_HEIGHT_M / 2]), DARK_METAL
    )
    painter.add_limb(shoulder, elbow, 0.028, UPPER_ARM)
    painter.add_limb(elbow, wrist, 0.024, FOREARM)


def _add_gripper(painter: Painter, table: Tabletop) -> None:
    painter.add_limb(_above(table, TOOL_LENGTH_M), _above(table, 0.045), 0.018, DARK_METAL)
    spread = (0.010 + 0.022 * table.opening) * 1.15
    for side in (-1, 1):
        painter.add_box(_above(table, 0.02, side * spread), FINGER_HALF_M, FINGER)


def _above(table: Tabletop, height: float, sideways: float = 0.0) -> Array:
    x, y, z = table.tool
    return np.array([x, y + sideways, z + height])


def _shade(colour: Colour, brightness: float) -> Colour:
    red, green, blue = (int(value * brightness) for value in colour)
    return red, green, blue


def _pixels(points: Array) -> list[tuple[float, float]]:
    return [(x, y) for x, y in points.tolist()]
