"""The embodiments that GR00T N1.7 knows by name, and which of the network's slots each one has.

Tags and slots are Isaac-GR00T's (gr00t/data/embodiment_tags.py, gr00t/model/gr00t_n1d7/processing_gr00t_n1d7.py). What
a checkpoint's own `embodiment_id.json` says wins over them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Final

from relay.engine.weights import CheckpointError
from relay.protocol.wording import shown


@dataclass(frozen=True, slots=True)
class Embodiment:
    """A robot as the checkpoint calls it.

    Attributes:
        tag: as in the checkpoint's files, such as `libero_sim`.
        slot: which of the per-embodiment maps are its.
    """

    tag: str
    slot: int

    @property
    def name(self) -> str:
        """What Isaac-GR00T's command line calls it, such as `LIBERO_PANDA`; a tag it does not know in capitals."""
        return KNOWN[self.tag].name if self.tag in KNOWN else self.tag.upper()


@dataclass(frozen=True, slots=True)
class KnownEmbodiment:
    """One row of the table.

    Attributes:
        pretrained: the released base model was trained on it; others need a fine-tuned checkpoint.
    """

    name: str
    slot: int
    pretrained: bool


KNOWN: Final[Mapping[str, KnownEmbodiment]] = {
    "oxe_droid_relative_eef_relative_joint": KnownEmbodiment("OXE_DROID_RELATIVE_EEF_RELATIVE_JOINT", 24, True),
    "xdof_relative_eef_relative_joint": KnownEmbodiment("XDOF", 27, True),
    "xdof_relative_eef_relative_joint_subtask": KnownEmbodiment("XDOF_SUBTASK", 27, True),
    "real_g1_relative_eef_relative_joints": KnownEmbodiment("REAL_G1", 25, True),
    "real_r1_pro_sharpa_relative_eef": KnownEmbodiment("REAL_R1_PRO_SHARPA", 26, True),
    "real_r1_pro_sharpa_relative_eef_human": KnownEmbodiment("REAL_R1_PRO_SHARPA_HUMAN", 26, True),
    "real_r1_pro_sharpa_relative_eef_maxinsights": KnownEmbodiment("REAL_R1_PRO_SHARPA_MAXINSIGHTS", 26, True),
    "real_r1_pro_sharpa_relative_eef_mecka": KnownEmbodiment("REAL_R1_PRO_SHARPA_MECKA", 26, True),
    "unitree_g1_full_body_with_waist_height_nav_cmd": KnownEmbodiment("UNITREE_G1", 25, False),
    "unitree_g1_sonic": KnownEmbodiment("UNITREE_G1_SONIC", 11, False),
    "libero_sim": KnownEmbodiment("LIBERO_PANDA", 2, False),
    "simpler_env_google": KnownEmbodiment("SIMPLER_ENV_GOOGLE", 0, False),
    "simpler_env_widowx": KnownEmbodiment("SIMPLER_ENV_WIDOWX", 1, False),
    "robocasa_panda_omron": KnownEmbodiment("ROBOCASA_PANDA_OMRON", 10, False),
    "robocasa_gr1_tabletop": KnownEmbodiment("ROBOCASA_GR1_TABLETOP", 10, False),
    "new_embodiment": KnownEmbodiment("NEW_EMBODIMENT", 10, False),
}


def resolve(wanted: str, ids: Mapping[str, Any], available: Sequence[str]) -> Embodiment:
    """The embodiment that a tag or a name means, in any case.

    Args:
        ids: the checkpoint's `embodiment_id.json`; tags that it leaves out have the table's slots.
        available: tags that the checkpoint has statistics and settings of.

    Raises:
        CheckpointError: no such embodiment, with all there are and the nearest; or one whose slot nothing says.
    """
    tag = _find(wanted, [*available, *ids, *KNOWN])
    if tag is None or tag not in available:
        raise CheckpointError(f"{_why_not(wanted, tag, available)}; this checkpoint has {_listed(available)}")
    slot = ids[tag] if tag in ids else KNOWN[tag].slot if tag in KNOWN else None
    if type(slot) is not int or slot < 0:
        told = "does not say" if slot is None else f"says {shown(slot)}, which is no number of"
        raise CheckpointError(f"embodiment_id.json {told} the slot of the embodiment {tag!r}; add it as an integer")
    return Embodiment(tag, slot)


def _find(wanted: str, tags: Iterable[str]) -> str | None:
    return next((tag for tag in tags if wanted.lower() in _spellings(tag)), None)


def _spellings(tag: str) -> list[str]:
    return [tag.lower(), KNOWN[tag].name.lower()] if tag in KNOWN else [tag.lower()]


def _why_not(wanted: str, tag: str | None, available: Sequence[str]) -> str:
    if tag is None:
        spelt = {spelling: known for known in available for spelling in _spellings(known)}
        within = [spelling for spelling in spelt if wanted.lower() in spelling]
        near = get_close_matches(wanted.lower(), spelt, n=1) or within
        hint = f", did you mean {spelt[near[0]]!r}?" if near else ""
        return f"{shown(wanted)} is not an embodiment of GR00T N1.7{hint}"
    if tag in KNOWN and not KNOWN[tag].pretrained:
        return f"this checkpoint was not trained on the embodiment {tag!r}, which needs a fine-tuned one"
    return f"this checkpoint has no statistics of the embodiment {tag!r}"


def _listed(available: Sequence[str]) -> str:
    named = [f"{tag} ({KNOWN[tag].name})" if tag in KNOWN else tag for tag in available]
    return ", ".join(named) or "none"
