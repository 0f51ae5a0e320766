"""`relay check`: what a checkpoint folder says, what would keep it from starting, and what its model would see."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import tyro

from relay.cli.extras import missing_for_models

if TYPE_CHECKING:
    from relay.models.report import Report

PICTURE = "frames.png"


@dataclass(frozen=True)
class Check:
    """Tell what a checkpoint holds and whether it would start, without reading its weights.

    Whether these hold NaN or infinity is seen when they are loaded.
    Ends with code 0 if it would start, 1 if not, 2 if a part of the command itself cannot be carried out.
    """

    checkpoint: tyro.conf.Positional[Path]
    """Folder of the checkpoint."""

    model: str | None = None
    """The model it is meant to be served as: pi0, pi05, groot or dreamzero; by default the folder's own."""

    config: str | None = None
    """openpi's configuration that the checkpoint was trained with, such as pi05_droid, where the folder doesn't say."""

    robot: str | None = None
    """Robot profile, by name or as a YAML file; by default the configuration's or the checkpoint's own."""

    embodiment: str | None = None
    """For groot and dreamzero: which of the checkpoint's robots, by its tag; needed where it was trained on several."""

    cameras: Literal["roboarena", "droid"] | None = None
    """For dreamzero: how clients number DROID's two exterior cameras; by default the folder's own."""

    tokenizer: Path | None = None
    """Tokenizer file, where the checkpoint folder has none."""

    frame: tuple[Path, ...] = ()
    """Picture files for the preview, in the order of the cameras; test cards by default."""

    prompt: str = "pick up the fork"
    """Task for the preview."""

    state: str | None = None
    """State for the preview, v,v,... in the robot's units; by default the middle of the training data."""

    write: bool = False
    """Write a complete relay.json into the folder, so that it can be served without further options."""

    write_profile: Path | None = None
    """Write the robot profile to this YAML file, to be edited and passed with --robot."""

    force: bool = False
    """Let --write, --write-profile and --prompts-from replace files that say something else."""

    prompts_from: Path | None = None
    """For dreamzero: your copy of its repository; writes the sentences around its prompts into the folder, as
    prompts.json, if it is one of dreamzero."""

    output: Path | None = None
    """Folder for frames.png, the frames as the model sees them."""

    json: bool = False
    """Print JSON."""

    def run(self) -> int:
        missing = missing_for_models("checking")
        if missing:
            return _fail(missing)
        from relay.cli.report_text import print_json, print_report

        try:
            self._write_prompts()
            report = self._inspect()
        except (ValueError, OSError) as error:
            return _fail(str(error))
        if self.json:
            print_json(report, self.checkpoint)
        else:
            print_report(report)
        code = 1 if report.problems else 0
        if report.refused:
            code = _fail(f"the preview's sample does not fit: {report.refused}")
        for write in (self._write_settings, self._write_profile, self._write_picture):
            try:
                done = write(report)
            except (ValueError, OSError) as error:
                code = _fail(str(error))
            else:
                if done:
                    print(done, file=sys.stderr if self.json else sys.stdout)
        return code

    def _write_prompts(self) -> None:
        """Before the report, as the folder wouldn't start without; and only into one that is dreamzero's."""
        if self.prompts_from is None:
            return
        from relay.models.dreamzero.inspection import is_dreamzero
        from relay.models.dreamzero.prompts import PROMPTS_FILE, make_prompts

        if not is_dreamzero(self.checkpoint):
            raise ValueError(
                f"--prompts-from: {self.checkpoint} is not a DreamZero checkpoint, so nothing was written; take the "
                "folder that holds its config.json"
            )
        path, text = self.checkpoint / PROMPTS_FILE, make_prompts(self.prompts_from)
        before = path.read_text("utf-8", "replace") if path.is_file() else None
        if before not in (None, text) and not self.force:
            raise ValueError(f"{path} is there and says something else; --force replaces it")
        if before != text:
            _replace_text(path, text)
        done = f"{path} is complete already" if before == text else f"wrote {path}"
        print(done, file=sys.stderr if self.json else sys.stdout)

    def _inspect(self) -> Report:
        from relay.models import registry
        from relay.models.report import Sample

        frames = [path.read_bytes() for path in self.frame]
        state = None if self.state is None else _numbers(self.state)
        return registry.inspect(
            self.model,
            checkpoint=self.checkpoint,
            config=self.config,
            robot=self.robot,
            embodiment=self.embodiment,
            cameras=self.cameras,
            tokenizer=self.tokenizer,
            sample=Sample(frames, self.prompt, state),
        )

    def _write_settings(self, report: Report) -> str | None:
        if not self.write or report.settings is None or report.settings_file is None:
            return None
        path = report.settings_file
        if path.is_file():
            before = _read_json(path)
            if before == report.settings:
                return f"{path} is complete already"
            changes = _changes(before, report.settings)
            if changes and not self.force:
                raise ValueError(f"{path} is there and says something else: {changes}; --force")
        _replace_text(path, json.dumps(report.settings, indent=2) + "\n")
        return f"wrote {path}"

    def _write_profile(self, report: Report) -> str | None:
        path = self.write_profile
        if path is None:
            return None
        if path.suffix not in (".yaml", ".yml"):
            raise ValueError(f"--write-profile {path}: expected a file that ends in .yaml")
        if report.profile is None:
            raise ValueError("--write-profile: no robot is known; name one with --robot, or openpi's configuration")
        from relay.robots.profile_text import profile_text

        text = profile_text(report.profile)
        if path.is_file() and path.read_text("utf-8", "replace") != text and not self.force:
            raise ValueError(f"{path} is there and says something else; --force replaces it")
        path.parent.mkdir(parents=True, exist_ok=True)
        _replace_text(path, text)
        return f"wrote {path}"

    def _write_picture(self, report: Report) -> str | None:
        if self.output is None or not report.frames:
            return None
        from relay.cli.contact_sheet import contact_sheet

        self.output.mkdir(parents=True, exist_ok=True)
        path = self.output / PICTURE
        contact_sheet(report.frames).save(path)
        return f"wrote {path}"


def _replace_text(path: Path, text: str) -> None:
    """Write a file whole or not at all: whoever reads it meanwhile sees what was there before."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_text(text, "utf-8")
        beside.replace(path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def _numbers(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"--state {text}: expected numbers with commas between them") from None


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError):
        return None


def _changes(before: Any, after: Mapping[str, Any]) -> str | None:
    """What a file says that would not be said any more; None if it only lacks something."""
    if not isinstance(before, dict):
        return "no object"
    said = cast("dict[str, Any]", before)
    changed = [key for key in said if key not in after or said[key] != after[key]]
    return f"changes {', '.join(changed)}" if changed else None


def _fail(message: str) -> int:
    print(f"relay check: {message}", file=sys.stderr)
    return 2
