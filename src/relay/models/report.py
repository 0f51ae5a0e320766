"""What a family tells about a checkpoint before it is loaded: tables and problems, in the same form for every family.

The families make reports, the command line shows them; neither knows the other. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relay.robots.profile import RobotProfile

Cell = str | int | float | bool | None


@dataclass(frozen=True, slots=True)
class Section:
    """One table.

    Attributes:
        columns: headings; two columns without headings are names and values.
        rows: as wide as the headings.
        remarks: sentences that belong under it.
    """

    title: str
    rows: Sequence[Sequence[Cell]]
    columns: Sequence[str] = ()
    remarks: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Sample:
    """An observation to show what becomes of one.

    Attributes:
        frames: image files, in the order of the cameras; without any, test cards.
        prompt: the task.
        state: in the robot's units where the robot is known, otherwise normalized; None takes a neutral one.
    """

    frames: Sequence[bytes] = ()
    prompt: str = "pick up the fork"
    state: Sequence[float] | None = None


@dataclass(frozen=True, slots=True)
class Report:
    """One checkpoint folder, as far as it is known without reading its weights.

    Attributes:
        model: the name to serve it by; None where the folder is not one of this family's.
        problems: why it would not start, a sentence each with its remedy.
        refused: why the sample is none of this checkpoint's, if so; it would start all the same.
        settings: what a complete `settings_file` holds; None while something is not known.
        frames: by camera, what the model would see of the sample, (height, width, 3) uint8; None where it is masked.
        tolerances: by dtype of the reference and of the engine, the largest distance from the reference's actions, in
            standard deviations, that comes from rounding alone.
    """

    model: str | None
    sections: Sequence[Section] = ()
    problems: Sequence[str] = ()
    refused: str | None = None
    settings: Mapping[str, Any] | None = None
    settings_file: Path | None = None
    profile: RobotProfile | None = None
    frames: Mapping[str, NDArray[np.uint8] | None] = field(default_factory=dict)
    tolerances: Mapping[tuple[str, str], float] = field(default_factory=dict)
