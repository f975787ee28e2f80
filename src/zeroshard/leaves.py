"""Modules that are one unit with all they contain: found by how finely they are cut, checked against the config.

The granularity of a module is the elements of its subtree over the modules in it that hold any, itself
included. Many small modules below one parent (experts, adapters) cost a gather each for next to nothing; a
threshold makes the first module from the root that is as fine as that one leaf.

Example: an attention of two linears of 10 elements each: 20 // (1 + 2) = 6. A block of it and a norm of 10:
30 // (1 + 4) = 6.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from zeroshard.layout import ModuleSpec

__all__ = ["MAX_LEAF", "leaves_by_granularity", "unmatched_leaves"]

MAX_LEAF = 1_000_000_000
"""Elements above which a subtree is never made a leaf: it would be gathered whole."""
_CONTAINERS = "torch.nn.modules.container."


def leaves_by_granularity(
    root: ModuleSpec, numel: Mapping[str, int], threshold: int
) -> tuple[ModuleSpec, tuple[str, int] | None]:
    """`root` with a leaf wherever, seen from the root, a module's granularity is first at most `threshold`.

    `numel`: elements by parameter name. Containers (their forward may never run), modules without children or
    without parameters, and subtrees of more than `MAX_LEAF` elements never qualify. Where none does, `root` is
    unchanged, and with it comes (path, granularity) of the finest module; None when there is nothing to cut.
    """
    granularity: dict[str, int] = {}

    def measure(module: ModuleSpec) -> tuple[int, int]:
        """(elements, modules that hold some) of a subtree."""
        elements, holders = sum(numel[name] for name in module.parameters), 0
        for child in module.children:
            below = measure(child)
            elements, holders = elements + below[0], holders + below[1]
        is_container = module.type_name.startswith(_CONTAINERS)
        if not elements or is_container:
            return elements, holders
        holders += 1
        if module.children and elements <= MAX_LEAF:
            granularity[module.path] = elements // holders
        return elements, holders

    def mark(module: ModuleSpec) -> ModuleSpec:
        if module.is_leaf:
            return module
        if granularity.get(module.path, threshold + 1) <= threshold:
            return replace(module, is_leaf=True)
        children = tuple(map(mark, module.children))
        return module if children == module.children else replace(module, children=children)

    measure(root)
    marked = mark(root)
    if marked != root or not granularity:
        return marked, None
    finest = min(granularity, key=granularity.__getitem__)
    return root, (finest, granularity[finest])


def unmatched_leaves(
    root: ModuleSpec, classes: Iterable[str], names: Iterable[str], suffixes: Iterable[str]
) -> tuple[str, ...]:
    """The entries of `leaf_module` that no module of the tree has, as `key: value`."""
    modules = list(root.walk())
    types = {part for module in modules for part in (module.type_name, module.type_name.rpartition(".")[2])}
    paths = [module.path for module in modules if module.path]
    return (
        *(f"classes: {entry!r}" for entry in classes if entry not in types),
        *(f"names: {entry!r}" for entry in names if entry not in paths),
        *(
            f"name_suffixes: {entry!r}"
            for entry in suffixes
            if not any(path.endswith(entry) for path in paths)
        ),
    )
