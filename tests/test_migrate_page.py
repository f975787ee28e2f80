"""docs/migrate.md says what the code says: its tables of keys, its commands, its links."""

from __future__ import annotations

import importlib.util
import pkgutil
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from zeroshard.config import iter_keys
from zeroshard.config.keys import TABLE
from zeroshard.config.status import no_effect
from zeroshard.launch.cli import ELSEWHERE

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])


@pytest.fixture
def tables() -> ModuleType:
    spec = importlib.util.spec_from_file_location("key_tables", ROOT / "docs/key_tables.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("page", ["migrate.md", "migrate.zh-CN.md"])
def test_tables_of_keys_are_those_of_the_code(tables: Any, page: str) -> None:
    now = (ROOT / "docs" / page).read_text(encoding="utf-8")
    assert now == tables.written(page), f"docs/{page} is behind the table of keys: run `make docs`"


def test_a_key_that_changes_is_seen(tables: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    key = next(key for key in TABLE if key.path == "zero_optimization.stage")
    changed = type(key)(path=key.path, tier="A", status=no_effect("it is a test"), meaning=key.meaning)
    monkeypatch.setattr(tables, "TABLE", (*TABLE, changed))
    assert "| `zero_optimization.stage` | it is a test |" in tables.written("migrate.md")
    with pytest.raises(KeyError, match="no Chinese for 'it is a test'"):
        tables.written("migrate.zh-CN.md")


def test_every_key_without_effect_is_in_a_table(tables: Any) -> None:
    """Also behind a `section.*`."""
    for kind, prefix in {"no effect": "no effect here", "not yet": "not yet", "refused": "refused"}.items():
        shown = [path for _, paths in tables.rows(kind) for path in paths]
        for key in iter_keys():
            wanted = key.status.startswith(prefix)
            inside = any(
                key.path == s or (s.endswith(".*") and f"{key.path}.".startswith(s[:-1])) for s in shown
            )
            if wanted or key.status.startswith("used by"):
                assert inside == wanted, key.path


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if target.startswith(("http://", "https://")):
            continue
        name, _, anchor = target.partition("#")
        there = page.parent / name if name else page
        assert there.exists(), f"{page.name}: {target}"
        if anchor:
            assert anchor in anchors(there), f"{page.name}: {target}"


def anchors(page: Path) -> set[str]:
    """As GitHub makes them: lower case, without punctuation, dashes for spaces."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    titles = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_exist(page: Path) -> None:
    """`zeroshard run ...` in a code span, or at the start of a line of a fenced block."""
    text = page.read_text(encoding="utf-8")
    fenced = "".join(re.findall(r"^```.*?^```", text, flags=re.DOTALL | re.MULTILINE))
    named = re.findall(r"`zeroshard ([a-z]+)", text) + re.findall(
        r"^zeroshard ([a-z]+)", fenced, re.MULTILINE
    )
    assert set(named) <= {"run", "config", *ELSEWHERE}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_names_exist(page: Path) -> None:
    """`zeroshard.some.name`, with or without a call, in a code span."""
    for name in re.findall(r"`(zeroshard(?:\.\w+)+)", page.read_text(encoding="utf-8")):
        assert pkgutil.resolve_name(name) is not None, f"{page.name}: {name}"
