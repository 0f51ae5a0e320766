"""Episodes as moving pictures: the spectator's view beside what the policy's two cameras saw."""

from __future__ import annotations

from collections.abc import Iterator
from io import BytesIO

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from relay.demo.drawing import IMAGE_SIZE, render_all
from relay.demo.episode import Episode
from relay.demo.spectator import SPECTATOR_SIZE, render_spectator
from relay.demo.tabletop import CONTROL_HZ, Tabletop

_GAP = SPECTATOR_SIZE - 2 * IMAGE_SIZE
_SIZE = (SPECTATOR_SIZE + _GAP + IMAGE_SIZE, SPECTATOR_SIZE)
_BACKGROUND = (16, 20, 28)
_TEXT = (232, 236, 242)
_QUIET_TEXT = (150, 160, 176)
_GOOD = (96, 222, 132)
_BAD = (255, 128, 112)
_FRAME_MS = round(1000 / CONTROL_HZ)
_LAST_FRAME_MS = 1800  # time to see the end before it begins again


def frames_of(episode: Episode) -> list[Image.Image]:
    """One picture per step of a recorded episode, RGB (688, 456)."""
    return [
        compose(table, episode.prompt, plan, failed=table.steps == episode.steps and not episode.success)
        for table, plan in _plans(episode)
    ]


def compose(table: Tabletop, prompt: str, plan: NDArray[np.float32], failed: bool = False) -> Image.Image:
    """The spectator's view with the task written over it, and the two cameras' pictures as they are.

    Args:
        table: the scene.
        prompt: the task.
        plan: what the policy is going to do, (n, 4) as `Request.plan`; drawn until the task is done.
        failed: whether this is the last picture of a failed attempt.
    """
    picture = Image.new("RGB", _SIZE, _BACKGROUND)
    picture.paste(Image.fromarray(render_spectator(table, None if table.succeeded else plan)))
    for row, frame in enumerate(render_all(table)):
        picture.paste(Image.fromarray(frame), (SPECTATOR_SIZE + _GAP, row * (IMAGE_SIZE + _GAP)))
    draw = ImageDraw.Draw(picture)
    draw.text((18, 14), prompt, font=ImageFont.load_default(19), fill=_TEXT)
    clock = f"{table.steps / CONTROL_HZ:.1f} s"
    small = ImageFont.load_default(15)
    draw.text((18, 42), clock, font=small, fill=_QUIET_TEXT)
    if table.succeeded or failed:
        text, colour = ("done", _GOOD) if table.succeeded else ("not done", _BAD)
        draw.text((18 + draw.textlength(clock + "   ", font=small), 42), text, font=small, fill=colour)
    return picture


def webp(frames: list[Image.Image]) -> bytes:
    """A looping WebP, small and in full colour."""
    return _save(frames, "WEBP", quality=82, method=2, minimize_size=False)


def gif(frames: list[Image.Image]) -> bytes:
    """A looping GIF for places that take nothing else; one palette for all pictures, so that it doesn't flicker."""
    palette = _shared_palette(frames[:: max(1, len(frames) // 4)])
    return _save([frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames], "GIF")


def _shared_palette(frames: list[Image.Image]) -> Image.Image:
    """A palette image for all of these: by how common colours are, for the large surfaces, and by how far apart
    they are, for the small bright ones."""
    sheet = Image.new("RGB", (_SIZE[0], _SIZE[1] * len(frames)))
    for row, frame in enumerate(frames):
        sheet.paste(frame, (0, row * _SIZE[1]))
    colours: list[int] = []
    for method, count in ((Image.Quantize.MEDIANCUT, 160), (Image.Quantize.FASTOCTREE, 96)):
        colours += (sheet.quantize(count, method, dither=Image.Dither.NONE).getpalette() or [])[: 3 * count]
    palette = Image.new("P", (1, 1))
    palette.putpalette(colours)
    return palette


def _plans(episode: Episode) -> Iterator[tuple[Tabletop, NDArray[np.float32]]]:
    """Each recorded state with what the policy planned for the steps that follow it."""
    for table in episode.states:
        request = max((r for r in episode.requests if r.step <= table.steps), key=lambda r: r.step)
        yield table, request.plan[table.steps - request.step :]


def _save(frames: list[Image.Image], form: str, **options: object) -> bytes:
    durations = [_FRAME_MS] * (len(frames) - 1) + [_LAST_FRAME_MS]
    encoded = BytesIO()
    frames[0].save(encoded, form, save_all=True, append_images=frames[1:], duration=durations, loop=0, **options)
    return encoded.getvalue()
