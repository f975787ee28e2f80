"""The known key that an unknown one was probably meant to be."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

from zeroshard.config.keys import BY_PATH, SECTIONS

__all__ = ["closest", "unknown_key_cure"]

_HINTS = {
    "seed": "there is no such key in DeepSpeed either; seed in your script",
    "sequence_parallel": "did you mean sequence_parallel_size?",
}


def closest(name: str, names: Iterable[str]) -> str | None:
    """The most similar of `names`, or None if none is similar."""
    found = difflib.get_close_matches(name, sorted(names), n=1)
    return found[0] if found else None


def unknown_key_cure(path: str) -> str:
    """What to do about the unknown key `path`: names the nearest known key, from any section."""
    if path in _HINTS:
        return _HINTS[path]
    if path in BY_PATH:
        # The user flattened what must be nested.
        section, _, leaf = path.rpartition(".")
        return f"keys are nested: write {leaf} inside {section}"
    near = _nearest(re.sub(r"\[\d+\]", "[]", path))
    return "remove it" if near is None else f"did you mean {near}?"


def _nearest(path: str) -> str | None:
    section, _, leaf = path.rpartition(".")
    best: tuple[float, bool, int] = (0.0, False, 0)
    found = None
    for known in (*BY_PATH, *SECTIONS):
        if "(" in known or ("[" in known and "[" not in path):
            continue
        known_section, _, known_leaf = known.rpartition(".")
        alike = _ratio(leaf, known_leaf)
        if alike < 0.7:
            continue
        # Of equals: the same section, then the keys that are used most, which are the shallow ones of tier A.
        score = alike + (0.2 if section == known_section else 0.0)
        tier_a = known in SECTIONS or BY_PATH[known].tier == "A"
        rank = (score, tier_a, -known.count("."))
        if rank > best:
            best, found = rank, known
    return found


def _ratio(left: str, right: str) -> float:
    matcher = difflib.SequenceMatcher(None, left.lower(), right.lower(), autojunk=False)
    # The two cheap upper bounds spare most of the work.
    if matcher.real_quick_ratio() < 0.7 or matcher.quick_ratio() < 0.7:
        return 0.0
    return matcher.ratio()
