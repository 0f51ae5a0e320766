"""The picture for people: the scene from the side, drawn with care, and the plan floating in it.

The policy never sees it. Everything is still Pillow polygons, at twice the size and scaled down.
"""

from __future__ import annotations

import math
from functools import cache, partial

import numpy as np
from numpy.typing import ArrayLike, NDArray
from PIL import Image, ImageChops, ImageDraw, ImageFilter

from relay.demo.drawing import CUBE_COLOURS, PLATE_COLOURS, Array, Camera, Colour, Painter
from relay.demo.tabletop import (
    CUBE_HALF_M,
    LINK_M,
    PLATE_RADIUS_M,
    SHOULDER_HEIGHT_M,
    TOOL_LENGTH_M,
    Tabletop,
)

SPECTATOR_SIZE = 456  # two camera pictures and a gap high
_FINE = 2 * SPECTATOR_SIZE
_SUN = np.array([0.35, 0.45, 1.0])  # towards the light
_CAMERA = Camera.looking_at((1.02, -0.60, 0.66), (0.215, -0.005, 0.105), (0, 0, 1), 2.42)

_SKY: tuple[Colour, Colour] = ((24, 30, 42), (58, 68, 86))  # top, bottom
_WOOD: tuple[Colour, Colour] = ((222, 200, 168), (214, 190, 156))
_WOOD_EDGE: Colour = (142, 112, 82)
_SHADOW: Colour = (28, 24, 34)
_SHADOW_STRENGTH = 0.42
_METAL: Colour = (74, 80, 92)
_SHELL: Colour = (240, 241, 244)
_ACCENT: Colour = (242, 120, 48)
_PLAN: Colour = (40, 214, 232)

_TABLE_X, _TABLE_Y, _TABLE_THICKNESS = (-0.10, 0.54), (-0.30, 0.30), 0.025
_PLATE_HEIGHT = 0.005


def render_spectator(table: Tabletop, plan: ArrayLike | None = None) -> NDArray[np.uint8]:
    """The scene from the side, uint8 RGB (456, 456, 3).

    Args:
        table: the scene.
        plan: places (n, 3 or more) in metres that the tool is going to, drawn as a fading string of beads.
    """
    image = _stage().copy()
    _cast_shadows(image, table)
    draw = ImageDraw.Draw(image)
    painter = Painter(draw, _CAMERA, _FINE)
    for name, (x, y) in table.plates.items():
        _plate(painter, x, y, PLATE_COLOURS[name])
    for name, (x, y, height) in table.cubes.items():
        _box(painter, np.array([x, y, height + CUBE_HALF_M]), np.full(3, CUBE_HALF_M), CUBE_COLOURS[name])
    _arm(painter, table)
    painter.finish()
    if plan is not None:
        _beads(image, np.asarray(plan, float)[:, :3])
    return np.asarray(image.reduce(2))


@cache
def _stage() -> Image.Image:
    """Everything that never moves: the background and the bare table."""
    top, bottom = (np.array(colour, float) for colour in _SKY)
    share = np.linspace(0, 1, _FINE)[:, None]
    rows = (top + (bottom - top) * share).astype(np.uint8)
    image = Image.fromarray(np.repeat(rows[:, None], _FINE, 1))
    painter = Painter(ImageDraw.Draw(image), _CAMERA, _FINE)
    (west, east), (south, north), low = _TABLE_X, _TABLE_Y, -_TABLE_THICKNESS
    painter.flat(_quad((east, south, 0), (east, north, 0), (east, north, low), (east, south, low)), _WOOD_EDGE)
    painter.flat(
        _quad((west, south, 0), (east, south, 0), (east, south, low), (west, south, low)),
        _lit(_WOOD_EDGE, 0.75),
    )
    xs, ys = np.linspace(west, east, 9), np.linspace(south, north, 9)
    for i in range(8):
        for j in range(8):
            corners = _quad((xs[i], ys[j], 0), (xs[i + 1], ys[j], 0), (xs[i + 1], ys[j + 1], 0), (xs[i], ys[j + 1], 0))
            painter.flat(corners, _WOOD[(i + j) % 2])
    return image


def _cast_shadows(image: Image.Image, table: Tabletop) -> None:
    """Darken the table where cubes and arm stand between it and the light."""
    mask = Image.new("L", (SPECTATOR_SIZE, SPECTATOR_SIZE))
    draw = ImageDraw.Draw(mask)

    def shade(points: Array) -> None:
        ground = points - points[:, 2:] * (_SUN / _SUN[2])
        pixels, _ = _CAMERA.project(ground, SPECTATOR_SIZE)
        draw.polygon(_hull(pixels), fill=255)

    for x, y, height in table.cubes.values():
        shade(_CUBE_CORNERS * CUBE_HALF_M + (x, y, height + CUBE_HALF_M))
    shoulder, elbow, wrist, tool = _skeleton(table)
    for start, end, radius in ((shoulder * (1, 1, 0), shoulder, 0.05), (shoulder, elbow, 0.03), (elbow, wrist, 0.026)):
        shade(np.concatenate([_CUBE_CORNERS * radius + start, _CUBE_CORNERS * radius + end]))
    shade(np.concatenate([_CUBE_CORNERS * (0.014, 0.03, 0.01) + wrist, _CUBE_CORNERS * (0.014, 0.03, 0.01) + tool]))
    soft = ImageChops.multiply(mask.filter(ImageFilter.GaussianBlur(3)), _table_mask())
    box = soft.getbbox()
    if box is not None:  # only where there is any: the picture is large
        dark = soft.crop(box).point([round(v * _SHADOW_STRENGTH) for v in range(256)])
        image.paste(_SHADOW, (2 * box[0], 2 * box[1]), dark.resize((2 * dark.width, 2 * dark.height)))


@cache
def _table_mask() -> Image.Image:
    mask = Image.new("L", (SPECTATOR_SIZE, SPECTATOR_SIZE))
    (west, east), (south, north) = _TABLE_X, _TABLE_Y
    pixels, _ = _CAMERA.project(
        _quad((west, south, 0), (east, south, 0), (east, north, 0), (west, north, 0)), SPECTATOR_SIZE
    )
    ImageDraw.Draw(mask).polygon([tuple(p) for p in pixels.tolist()], fill=255)
    return mask


def _plate(painter: Painter, x: float, y: float, colour: Colour) -> None:
    centre = np.array([x, y, 0.0])
    rim = np.array([x, y, _PLATE_HEIGHT])
    painter.flat(_CIRCLE * PLATE_RADIUS_M + centre, _lit(colour, 0.55))
    painter.flat(_CIRCLE * PLATE_RADIUS_M + rim, _lit(colour, 1.0))
    painter.flat(_CIRCLE * (0.78 * PLATE_RADIUS_M) + rim, _lit(colour, 0.82))
    painter.flat(_CIRCLE * (0.74 * PLATE_RADIUS_M) + rim, _lit(colour, 0.92))


def _box(painter: Painter, centre: Array, half: Array, colour: Colour) -> None:
    """A box whose faces have a lighter field inside, which reads as a rounded edge."""
    painter.add_box(centre, half, colour)
    for axis, sign in ((0, 1), (1, -1), (2, 1)):  # the faces this camera sees
        across = [a for a in range(3) if a != axis]
        corners = np.zeros((4, 3))
        corners[:, axis] = sign
        corners[:, across] = 0.84 * np.array([(-1, -1), (1, -1), (1, 1), (-1, 1)])
        brightness = (1.0, 0.78, 1.16)[axis]
        paint = partial(painter.flat, corners * half + centre, _lit(colour, brightness))
        painter.add(centre, paint)


def _arm(painter: Painter, table: Tabletop) -> None:
    shoulder, elbow, wrist, tool = _skeleton(table)
    ground = shoulder * (1, 1, 0)
    flange = ground + np.array([0, 0, 0.02])
    painter.add(ground, partial(_cylinder, painter, ground, flange, 0.062, _lit(_METAL, 0.7)))
    painter.add(flange, partial(_cylinder, painter, flange, shoulder, 0.05, _METAL))
    _limb(painter, shoulder, elbow, 0.031, _SHELL)
    _limb(painter, elbow, wrist, 0.026, _SHELL)
    for joint, radius in ((shoulder, 0.018), (elbow, 0.016)):
        _limb(painter, joint, joint * 0.9999, radius, _ACCENT, nearer=0.15)
    palm, fingers = (tool + np.array([0, 0, height]) for height in (0.054, 0.02))
    _limb(painter, wrist, palm, 0.019, _METAL)
    _box(painter, palm, np.array([0.012, 0.042, 0.007]), _METAL)
    spread = (0.010 + 0.022 * table.opening) * 1.15
    for side in (-spread, spread):
        _box(painter, fingers + np.array([0, side, 0]), np.array([0.008, 0.006, 0.03]), _lit(_METAL, 0.8))


def _skeleton(table: Tabletop) -> tuple[Array, Array, Array, Array]:
    """Shoulder, elbow, wrist and tool, (3,) each."""
    yaw, lift, _ = table.joints
    x, y, z = table.tool
    reach = LINK_M * math.cos(lift)
    elbow = [reach * math.cos(yaw), reach * math.sin(yaw), SHOULDER_HEIGHT_M + LINK_M * math.sin(lift)]
    joints = [0.0, 0.0, SHOULDER_HEIGHT_M], elbow, [x, y, z + TOOL_LENGTH_M], [x, y, z]
    shoulder, elbow, wrist, tool = (np.array(joint) for joint in joints)
    return shoulder, elbow, wrist, tool


def _limb(painter: Painter, start: Array, end: Array, radius: float, colour: Colour, nearer: float = 0.0) -> None:
    """A round bar: the same bar ever thinner and brighter, towards the light."""
    middle = (start + end) / 2
    towards_eye = (_CAMERA.eye - middle) / np.linalg.norm(_CAMERA.eye - middle)
    pixels, depth = _CAMERA.project(np.stack([start, end]), _FINE)
    widths = _FINE * _CAMERA.focal * radius / depth
    painter.add(middle + towards_eye * nearer, partial(_paint_limb, painter, pixels, widths, colour))


def _paint_limb(painter: Painter, pixels: Array, widths: Array, colour: Colour) -> None:
    along = pixels[1] - pixels[0]
    across = np.array([-along[1], along[0]]) / max(1.0, float(np.linalg.norm(along)))
    for step in range(6):
        radii = widths * (1 - step * 0.16) / 2
        fill = _lit(colour, 0.62 + 0.44 * (step / 5) ** 0.7)
        centres = pixels + np.outer(widths * step * 0.045, (0.35, -1.0))
        sides = np.outer(radii, across)
        outline = np.concatenate([centres + sides, (centres - sides)[::-1]])
        painter.draw.polygon([(x, y) for x, y in outline.tolist()], fill=fill)
        for (x, y), r in zip(centres.tolist(), radii.tolist(), strict=True):
            painter.draw.ellipse((x - r, y - r, x + r, y + r), fill=fill)


def _cylinder(painter: Painter, foot: Array, top: Array, radius: float, colour: Colour) -> None:
    ends = [_CAMERA.project(_CIRCLE * radius + centre, _FINE)[0] for centre in (foot, top)]
    painter.draw.polygon(_hull(np.concatenate(ends)), fill=_lit(colour, 0.85))
    painter.draw.polygon(_hull(ends[1]), fill=_lit(colour, 1.15))


def _beads(image: Image.Image, places: Array) -> None:
    """Where the tool is going to be, step by step, the far future fainter."""
    pixels, depth = _CAMERA.project(places, _FINE)
    radii = _FINE * _CAMERA.focal * 0.00275 / depth + 1.5
    draw = ImageDraw.Draw(image, "RGBA")  # blends, though the picture has no alpha itself
    for i in reversed(range(len(places))):
        (x, y), r = pixels[i].tolist(), float(radii[i])
        draw.ellipse((x - r, y - r, x + r, y + r), fill=(*_PLAN, round(255 * (1 - 0.7 * i / len(places)))))


_CUBE_CORNERS = np.array([(x, y, z) for x in (-1, 1) for y in (-1, 1) for z in (-1, 1)], float)
_ANGLES = np.linspace(0, 2 * math.pi, 48, endpoint=False)
_CIRCLE = np.stack([np.cos(_ANGLES), np.sin(_ANGLES), np.zeros(48)], 1)


def _quad(*corners: tuple[float, float, float]) -> Array:
    return np.array(corners, float)


def _hull(points: Array) -> list[tuple[float, float]]:
    """The convex outline of points (n, 2), by Andrew's monotone chain."""
    ordered = sorted(map(tuple, points.tolist()))

    def chain(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
        outline: list[tuple[float, float]] = []
        for x, y in points:
            while len(outline) > 1:
                (ax, ay), (bx, by) = outline[-2:]
                if (bx - ax) * (y - ay) - (by - ay) * (x - ax) > 0:
                    break
                outline.pop()
            outline.append((x, y))
        return outline[:-1]

    return chain(ordered) + chain(ordered[::-1])


def _lit(colour: Colour, brightness: float) -> Colour:
    red, green, blue = (min(255, int(value * brightness)) for value in colour)
    return red, green, blue
