"""Write the tables of config keys into the migration pages, from the table in `zeroshard.config`.

    python docs/key_tables.py        # or: make docs

What is between a marker and the next `<!-- end -->` is replaced. Reasons on the Chinese page are looked up in
`key_reasons.zh-CN.json`; one that is not there is an error that names it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

from zeroshard.config.keys import TABLE

HERE = Path(__file__).parent
REASONS = HERE / "key_reasons.zh-CN.json"
MARKERS = {"no effect": "keys without effect", "not yet": "keys not yet", "refused": "keys refused"}
HEADERS = {
    "migrate.md": {
        "no effect": ("key", "no effect, because"),
        "not yet": ("key", "waits for"),
        "refused": ("key", "refused, because"),
    },
    "migrate.zh-CN.md": {
        "no effect": ("键", "不起作用的原因"),
        "not yet": ("键", "所等待的功能"),
        "refused": ("键", "拒绝的原因"),
    },
}


def folded(paths: list[str]) -> list[str]:
    """`paths` with `section.*` for every section all of whose keys, other spellings aside, are among them."""
    wanted = set(paths)
    own = [key.path for key in TABLE if key.status.kind not in ("alias", "deprecated")]

    def shown(path: str) -> str:
        parts = path.split(".")
        for length in range(1, len(parts)):
            section = ".".join(parts[:length]) + "."
            inside = [path for path in own if path.startswith(section)]
            if len(inside) > 1 and wanted.issuperset(inside):
                return f"{section}*"
        return path

    short = dict.fromkeys(shown(path) for path in paths)
    return [path for path in short if f"{path}.*" not in short]


def rows(kind: str) -> list[tuple[str, list[str]]]:
    """(reason, keys) of the keys whose status is `kind`, in the order of the table."""
    by_reason: dict[str, list[str]] = {}
    for key in TABLE:
        if key.status.kind == kind:
            by_reason.setdefault(key.status.text, []).append(key.path)
    return [(reason, folded(paths)) for reason, paths in by_reason.items()]


def table(kind: str, header: tuple[str, str], translate: Callable[[str], str]) -> str:
    """A table in Markdown."""
    lines = [header, ("---", "---")]
    for reason, paths in rows(kind):
        lines.append((", ".join(f"`{path}`".replace("|", "\\|") for path in paths), translate(reason)))
    return "".join(f"| {left} | {right} |\n" for left, right in lines)


def in_chinese(reason: str) -> str:
    """Raises KeyError for a reason that nobody has translated yet."""
    known = json.loads(REASONS.read_text(encoding="utf-8"))
    if reason not in known:
        raise KeyError(f"{REASONS.name} has no Chinese for {reason!r}: add it, then run `make docs`")
    return str(known[reason])


def written(page: str) -> str:
    """The text of `page`, a file of this directory, with its tables as the code has them now."""
    text = (HERE / page).read_text(encoding="utf-8")
    translate = in_chinese if page.endswith(".zh-CN.md") else str
    for kind, marker in MARKERS.items():
        begin = f"<!-- {marker}: written by `make docs` -->\n"
        pattern = re.escape(begin) + r".*?<!-- end -->"
        if len(re.findall(pattern, text, flags=re.DOTALL)) != 1:
            raise ValueError(f"{page} must have {begin.strip()} and <!-- end --> once")
        new = f"{begin}\n{table(kind, HEADERS[page][kind], translate)}\n<!-- end -->"
        text = re.sub(pattern, new.replace("\\", r"\\"), text, flags=re.DOTALL)
    return text


if __name__ == "__main__":
    for name in HEADERS:
        (HERE / name).write_text(written(name), encoding="utf-8")
