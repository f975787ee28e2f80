"""The Chinese pages say what the English ones say: same headings, same code, same names, same links.

What fails names the section. Prose is translated by hand: who changes an English page changes the Chinese one.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TRANSLATED = {
    path: path.with_name(path.name.replace(".zh-CN", ""))
    for folder in (ROOT, ROOT / "docs")
    for path in folder.glob("*.zh-CN.md")
}
"""Chinese page -> English page."""
CHINESE = sorted(TRANSLATED)
CODE = re.compile(r"(`+)(.+?)\1", re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
COMMAND = re.compile(r"(zeroshard|make|pip|python)\b")


@dataclass
class Part:
    """A heading with what stands below it, to the next one."""

    level: int
    title: str
    fences: list[str] = field(default_factory=list)
    prose: str = ""

    @property
    def anchor(self) -> str:
        return re.sub(r"[^\w\- ]", "", self.title.lower()).replace(" ", "-")

    @property
    def code(self) -> Counter[str]:
        spans = (span for _, span in CODE.findall(f"{self.title}\n{self.prose}"))
        return Counter(" ".join(span.split()) for span in spans)

    @property
    def shape(self) -> Counter[str]:
        """Rows of tables, items of lists, markers."""
        return Counter(
            kind
            for line in self.prose.splitlines()
            for kind, start in {"row": r"\|", "item": r"- |\d+\. ", "marker": "<!--"}.items()
            if re.match(start, line)
        )


def parts(page: Path) -> list[Part]:
    found: list[Part] = []
    fence: str | None = None
    for line in page.read_text(encoding="utf-8").splitlines(keepends=True):
        if fence is not None:
            fence += line
            if line.startswith("```"):
                found[-1].fences.append(fence)
                fence = None
        elif line.startswith("```"):
            fence = line
        elif heading := re.match(r"(#+) (.*)", line):
            found.append(Part(level=len(heading[1]), title=heading[2].strip()))
        else:
            found[-1].prose += line
    assert fence is None, f"{page.name} has a fence that is not closed"
    return found


def pairs(page: Path) -> list[tuple[Part, Part]]:
    """(English, Chinese) by place."""
    return list(zip(parts(TRANSLATED[page]), parts(page), strict=True))


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def test_there_are_pages() -> None:
    assert {name_of(page) for page in CHINESE} >= {"README.zh-CN.md", "docs/migrate.zh-CN.md"}


@pytest.mark.parametrize("page", CHINESE, ids=name_of)
class TestPage:
    def test_headings(self, page: Path) -> None:
        """One for one, in the same order, at the same level; so each has its English one."""
        english = [f"{'#' * part.level} {part.title}" for part in parts(TRANSLATED[page])]
        chinese = [f"{'#' * part.level} {part.title}" for part in parts(page)]
        table = "\n".join(f"{en}   =   {zh}" for en, zh in zip(english, chinese, strict=False))
        assert len(english) == len(chinese), table
        for en, zh in pairs(page):
            assert en.level == zh.level, table
            assert [c[1] for c in CODE.findall(en.title)] == [c[1] for c in CODE.findall(zh.title)], table

    def test_fenced_blocks(self, page: Path) -> None:
        for en, zh in pairs(page):
            assert zh.fences == en.fences, f"{en.title} = {zh.title}"

    def test_code_spans(self, page: Path) -> None:
        """Commands, keys, names and error texts: each as often in both."""
        for en, zh in pairs(page):
            missing, extra = en.code - zh.code, zh.code - en.code
            assert not missing, f"{en.title} = {zh.title}: not in the Chinese page"
            assert not extra, f"{en.title} = {zh.title}: not in the English page"

    def test_commands(self, page: Path) -> None:
        """Over the whole page, so that a sentence may move from one section to another."""
        english, chinese = (
            Counter(s for part in both for s in part.code.elements() if COMMAND.match(s))
            for both in zip(*pairs(page), strict=True)
        )
        assert english == chinese

    def test_tables_and_lists(self, page: Path) -> None:
        for en, zh in pairs(page):
            assert zh.shape == en.shape, f"{en.title} = {zh.title}"

    def test_links(self, page: Path) -> None:
        """A link to a page that there is in Chinese leads to that, another one where the English one leads."""
        for en, zh in pairs(page):
            assert targets(zh, page) == [in_chinese(target, page) for target in targets(en, page)], (
                f"{en.title} = {zh.title}"
            )

    def test_pages_lead_to_each_other(self, page: Path) -> None:
        english = TRANSLATED[page]
        assert f"[简体中文]({page.name})" in parts(english)[0].prose
        assert f"[English]({english.name})" in parts(page)[0].prose

    def test_it_is_chinese(self, page: Path) -> None:
        """A paragraph that was left in English is found: prose, without code and links, is mostly Chinese."""
        for part in parts(page):
            text = re.sub(r"<!--.*?-->", "", LINK.sub("]", CODE.sub("", part.prose)))
            for paragraph in re.split(r"\n\s*\n", text):
                latin = len(re.findall(r"[A-Za-z]{2,}", paragraph))
                han = len(re.findall(r"[\u4e00-\u9fff]", paragraph))
                assert latin < 8 or han > latin, f"{part.title}: {paragraph[:80]}"


def targets(part: Part, page: Path) -> list[str]:
    """Where links lead, but for those from one language to the other."""
    other = {page.name, TRANSLATED[page].name}
    return [target for target in LINK.findall(part.prose) if target not in other]


def in_chinese(target: str, page: Path) -> str:
    name, _, anchor = target.partition("#")
    if target.startswith(("http://", "https://")):
        return target
    translation = (page.parent / name).with_suffix(".zh-CN.md") if name else page
    if translation.resolve() not in TRANSLATED:
        return target
    there = f"{name.removesuffix('.md')}.zh-CN.md" if name else ""
    if not anchor:
        return there
    return f"{there}#{next(zh.anchor for en, zh in pairs(translation.resolve()) if en.anchor == anchor)}"
