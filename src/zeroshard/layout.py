"""Which parameters travel together, and where each one lies in its flat buffer. Integers and names only.

Words: a *group* is a module and the parameters that are used while it runs; a *bucket* is what is gathered,
freed and reduced in one go: parameters of one dtype and one kind, laid end to end in a flat buffer; a *slot*
is one parameter's place in it; a *piece* is the part of a slot that one rank owns.

Worked example, 2 ranks, alignment 1, parameters a (5 elements) and b (2), granularity 1:

    full    [a0 a1 a2 a3 | a4 b0 b1 --]     padded to 8, shards of 4
    rank 0 owns a[0:4]; rank 1 owns a[4:5] and b[0:2]; one element of padding.

With granularity 5 for a ("do not cut a"), a shard holds at least 5: [a0..a4 | b0 b1 -- -- --].
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from zeroshard.policy import BYTES_OF, Policy

__all__ = [
    "ALIGNMENT_BYTES",
    "BucketLayout",
    "Layout",
    "ModuleSpec",
    "ParameterSpec",
    "Piece",
    "Slot",
    "Unit",
    "pack",
    "plan_layout",
    "unfrozen",
]

ALIGNMENT_BYTES = 64
"""Every parameter and every shard starts on this boundary of its flat buffer: what vector units and
collectives like best, and no padding at all for the usual widths."""
SMALL_NEIGHBOUR = 1 << 16
"""Groups below this many elements are merged with the next one of the same parent."""
RESIDENT_BUCKETS = 8
MIN_RESIDENT_BUCKET = 1 << 20
"""A model is cut into about this many resident buckets (never below the minimum), so that reduction
overlaps backward and a whole model's gradient is never in flight at once; `bucket_size` is the ceiling."""


@dataclass(frozen=True, kw_only=True)
class ParameterSpec:
    """One parameter of the model. `dtype` is what the model sees, by torch's name."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    trainable: bool
    granularity: int = 1
    """A shard boundary may fall only on multiples of this many elements from the parameter's start."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def is_uncut(self) -> bool:
        """One rank owns all of it."""
        return self.granularity > 1 and self.granularity >= self.numel


@dataclass(frozen=True, kw_only=True)
class ModuleSpec:
    """One module: its class, its children in order, and the names of its direct parameters.

    A tied parameter appears under every module that holds it, by its first name.
    """

    path: str
    type_name: str
    parameters: tuple[str, ...] = ()
    children: tuple[ModuleSpec, ...] = ()
    is_sequence: bool = False
    """A ModuleList or Sequential: children of one class are repeated blocks."""
    is_leaf: bool = False
    """Named by `leaf_module`: one group whatever is inside."""

    def walk(self) -> Iterator[ModuleSpec]:
        yield self
        for child in self.children:
            yield from child.walk()


@dataclass(frozen=True, kw_only=True)
class Slot:
    """A parameter's place: elements `[offset, offset + numel)` of the flat buffer."""

    spec: ParameterSpec
    offset: int

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def numel(self) -> int:
        return self.spec.numel

    @property
    def end(self) -> int:
        return self.offset + self.spec.numel


@dataclass(frozen=True, kw_only=True)
class Piece:
    """The part of a slot one rank owns: `[start, stop)` of the flattened parameter, at `at` of the shard."""

    slot: Slot
    start: int
    stop: int
    at: int

    @property
    def numel(self) -> int:
        return self.stop - self.start

    @property
    def in_shard(self) -> slice:
        """Its elements of the shard."""
        return slice(self.at, self.at + self.stop - self.start)

    @property
    def is_whole(self) -> bool:
        return self.numel == self.slot.numel


@dataclass(frozen=True, kw_only=True)
class BucketLayout:
    """One flat buffer: `shards` equal shards of `shard_numel` elements, padding included."""

    index: int
    name: str
    dtype: str
    trainable: bool
    resident: bool
    """Never freed: all of stages 0-2, and what persists under stage 3."""
    slots: tuple[Slot, ...]
    shard_numel: int
    shards: int

    @property
    def padded(self) -> int:
        return self.shard_numel * self.shards

    @property
    def numel(self) -> int:
        """Elements of parameters, without padding."""
        return sum(slot.numel for slot in self.slots)

    @property
    def nbytes(self) -> int:
        return self.padded * BYTES_OF[self.dtype]

    def shard(self, rank: int) -> slice:
        """The elements of `full` that are shard `rank`."""
        return slice(rank * self.shard_numel, (rank + 1) * self.shard_numel)

    def gaps(self) -> tuple[tuple[int, int], ...]:
        """The ranges of `full` that belong to no parameter."""
        edges = [(0, 0), *((slot.offset, slot.end) for slot in self.slots), (self.padded, self.padded)]
        edges.sort()
        pairs = itertools.pairwise(edges)
        return tuple((left[1], right[0]) for left, right in pairs if right[0] > left[1])

    def pieces(self, rank: int) -> tuple[Piece, ...]:
        """What shard `rank` holds of each slot, in slot order; zero elements where it holds none."""
        return tuple(self.piece(index, rank) for index in range(len(self.slots)))

    def piece(self, index: int, rank: int) -> Piece:
        """What shard `rank` holds of slot `index`."""
        slot, shard = self.slots[index], self.shard(rank)
        low, high = shard.start, shard.stop
        start = min(max(low - slot.offset, 0), slot.numel)
        stop = max(min(high - slot.offset, slot.numel), start)
        return Piece(slot=slot, start=start, stop=stop, at=slot.offset + start - low if stop > start else 0)


@dataclass(frozen=True, kw_only=True)
class Unit:
    """A module that reports to the executor, and the buckets that must be there while it runs."""

    path: str
    buckets: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """All buckets of a model and all modules that use them."""

    buckets: tuple[BucketLayout, ...]
    units: tuple[Unit, ...]
    reduce_order: tuple[int, ...]
    """Trainable buckets in the order backward is expected to complete them."""
    slot_of: Mapping[str, tuple[int, int]] = field(repr=False)
    """Parameter name -> (bucket, slot)."""

    @property
    def numel(self) -> int:
        return sum(bucket.numel for bucket in self.buckets)

    @property
    def padding(self) -> int:
        """Elements that belong to no parameter, over all buckets."""
        return sum(bucket.padded for bucket in self.buckets) - self.numel


def unfrozen(layout: Layout, buckets: Collection[int], definition: Sequence[str]) -> Layout:
    """`layout` with `buckets` trainable as well. `definition`: parameter names in order of definition."""
    changed = tuple(
        replace(bucket, trainable=bucket.trainable or bucket.index in buckets) for bucket in layout.buckets
    )
    return replace(layout, buckets=changed, reduce_order=_reduce_order(changed, definition))


@dataclass(kw_only=True)
class _Group:
    """A module and the parameters used while it runs, before they are cut into buckets."""

    path: str
    parent: str
    names: list[str]
    is_block: bool
    paths: list[str] = field(default_factory=list)


def plan_layout(root: ModuleSpec, parameters: Sequence[ParameterSpec], policy: Policy) -> Layout:
    """Cut a model into buckets.

    `parameters` come in order of definition, tied ones once. Resident parameters (all of them, unless the
    policy frees after use) are packed in reverse order of definition, which is about the order in which
    backward completes them. The others are one bucket per group: a repeated block, or a module with
    parameters of its own. Different dtypes, and frozen next to trainable, get buckets of their own.
    """
    spec_of = {spec.name: spec for spec in parameters}
    groups = _merge_small(_find_groups(root, spec_of, policy), spec_of)
    resident = _resident_names(parameters, policy)
    drafts: list[tuple[str, list[ParameterSpec], bool]] = []
    for group in groups:
        sharded = [spec_of[name] for name in group.names if name not in resident]
        drafts += [(group.path or "(root)", part, False) for part in _by_kind(sharded)]
    remaining = [spec for spec in reversed(parameters) if spec.name in resident]
    for part in _by_kind(remaining):
        for chunk in _chunks(part, _resident_bucket_size(parameters, policy)):
            drafts.append(
                (f"{chunk[-1].name}..{chunk[0].name}" if len(chunk) > 1 else chunk[0].name, chunk, True)
            )
    buckets = tuple(
        _bucket(index, name, specs, is_resident, policy)
        for index, (name, specs, is_resident) in enumerate(drafts)
    )
    slot_of = {
        slot.name: (bucket.index, place) for bucket in buckets for place, slot in enumerate(bucket.slots)
    }
    return Layout(
        buckets=buckets,
        units=_units(root, groups, slot_of),
        reduce_order=_reduce_order(buckets, [spec.name for spec in parameters]),
        slot_of=slot_of,
    )


def pack(specs: Sequence[ParameterSpec], shards: int, align: int) -> tuple[tuple[Slot, ...], int]:
    """Lay `specs` end to end so that `shards` equal shards cut none below its granularity.

    Returns the slots and the elements per shard. Greedy: the shard starts at the size an even cut would
    have and grows until everything fits, so the result is close to the smallest, not provably it.
    """
    if specs and all(spec.is_uncut for spec in specs):
        return _pack_whole(specs, shards, align)
    total = sum(_round_up(spec.numel, align) for spec in specs)
    shard = _round_up(max(math.ceil(total / shards), 1), align)
    while True:
        slots = _place(specs, shard, align)
        excess = (slots[-1].end - shard * shards) if slots else 0
        if slots is not None and excess <= 0:
            return slots, shard
        # Once the shard holds the longest parameter a place is always found, so this ends.
        shard += _round_up(max(excess // shards, 1), align)


def _pack_whole(specs: Sequence[ParameterSpec], shards: int, align: int) -> tuple[tuple[Slot, ...], int]:
    """Whole parameters: the longest first, each to the shard that has least so far (Graham's LPT rule, at most
    a third above the best balance). Slots come in order of their place."""
    used = [0] * shards
    places: list[tuple[int, int, ParameterSpec]] = []
    for spec in sorted(specs, key=lambda spec: -spec.numel):
        owner = used.index(min(used))
        places.append((owner, used[owner], spec))
        used[owner] += _round_up(spec.numel, align)
    shard = max(max(used), align)
    slots = [Slot(spec=spec, offset=owner * shard + at) for owner, at, spec in places]
    return tuple(sorted(slots, key=lambda slot: slot.offset)), shard


def _place(specs: Sequence[ParameterSpec], shard: int, align: int) -> tuple[Slot, ...] | None:
    """Slots for shards of this size, or None when some parameter cannot lie anywhere."""
    slots, cursor = [], 0
    for spec in specs:
        start = _first_allowed(spec, _round_up(cursor, align), shard, align)
        if start is None:
            return None
        slots.append(Slot(spec=spec, offset=start))
        cursor = start + spec.numel
    return tuple(slots)


def _first_allowed(spec: ParameterSpec, start: int, shard: int, align: int) -> int | None:
    """The first aligned offset >= start at which every shard boundary inside `spec` respects it."""
    if spec.granularity <= 1 or spec.numel == 0:
        return start
    if spec.numel <= shard and spec.granularity >= spec.numel:
        boundary = (start // shard + 1) * shard
        return start if start + spec.numel <= boundary else boundary
    for offset in range(start, start + shard + 1, align):
        boundary = (offset // shard + 1) * shard
        if all((cut - offset) % spec.granularity == 0 for cut in range(boundary, offset + spec.numel, shard)):
            return offset
    return None


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _bucket(
    index: int, name: str, specs: Sequence[ParameterSpec], resident: bool, policy: Policy
) -> BucketLayout:
    dtype = specs[0].dtype
    slots, shard_numel = pack(specs, policy.shard_size, ALIGNMENT_BYTES // BYTES_OF[dtype])
    return BucketLayout(
        index=index,
        name=name,
        dtype=dtype,
        trainable=specs[0].trainable,
        resident=resident,
        slots=slots,
        shard_numel=shard_numel,
        shards=policy.shard_size,
    )


def _by_kind(specs: Iterable[ParameterSpec]) -> list[list[ParameterSpec]]:
    kinds: dict[tuple[str, bool, bool], list[ParameterSpec]] = {}
    for spec in specs:
        kinds.setdefault((spec.dtype, spec.trainable, spec.is_uncut), []).append(spec)
    return list(kinds.values())


def _chunks(specs: Sequence[ParameterSpec], limit: int) -> Iterator[list[ParameterSpec]]:
    """Consecutive runs of at most `limit` elements; a longer parameter is a run of its own."""
    run: list[ParameterSpec] = []
    size = 0
    for spec in specs:
        if run and size + spec.numel > limit:
            yield run
            run, size = [], 0
        run.append(spec)
        size += spec.numel
    if run:
        yield run


def _resident_bucket_size(parameters: Sequence[ParameterSpec], policy: Policy) -> int:
    total = sum(spec.numel for spec in parameters)
    return max(min(policy.bucket_size, max(total // RESIDENT_BUCKETS, MIN_RESIDENT_BUCKET)), 1)


def _resident_names(parameters: Sequence[ParameterSpec], policy: Policy) -> set[str]:
    if not policy.free_after_use or policy.shard_size == 1:
        return {spec.name for spec in parameters}
    chosen, total = set(), 0
    for spec in parameters:
        small = spec.numel <= policy.persistence_threshold
        if small and total + spec.numel <= policy.model_persistence_threshold:
            chosen.add(spec.name)
            total += spec.numel
    return chosen


def _find_groups(root: ModuleSpec, spec_of: Mapping[str, ParameterSpec], policy: Policy) -> list[_Group]:
    groups: list[_Group] = []
    taken: set[str] = set()
    split_above = policy.max_live // 2

    def claim(names: Iterable[str]) -> list[str]:
        fresh = [name for name in dict.fromkeys(names) if name not in taken]
        taken.update(fresh)
        return fresh

    def visit(module: ModuleSpec, parent: str, is_block: bool) -> None:
        inside = list(dict.fromkeys(name for below in module.walk() for name in below.parameters))
        size = sum(spec_of[name].numel for name in inside)
        if module.is_leaf or (is_block and size <= split_above):
            groups.append(_Group(path=module.path, parent=parent, names=claim(inside), is_block=True))
            return
        if module.parameters:
            names = claim(module.parameters)
            groups.append(_Group(path=module.path, parent=parent, names=names, is_block=False))
        repeated = _repeated_types(module)
        for child in module.children:
            # A block that was too large is split into its children, each a block in its turn.
            visit(child, module.path, is_block or child.type_name in repeated)

    visit(root, "", is_block=False)
    return groups


def _repeated_types(module: ModuleSpec) -> set[str]:
    if not module.is_sequence:
        return set()
    types = [child.type_name for child in module.children if any(m.parameters for m in child.walk())]
    return {name for name in types if types.count(name) > 1}


def _merge_small(groups: list[_Group], spec_of: Mapping[str, ParameterSpec]) -> list[_Group]:
    """Join small neighbours of one parent, which usually run one after the other."""
    merged: list[_Group] = []

    def size(group: _Group) -> int:
        return sum(spec_of[name].numel for name in group.names)

    for group in groups:
        group.paths = [group.path]
        last = merged[-1] if merged else None
        if (
            last is not None
            and not (group.is_block or last.is_block)
            and group.parent == last.parent
            and last.path != group.parent
            and size(group) + size(last) <= SMALL_NEIGHBOUR
        ):
            last.names += group.names
            last.paths.append(group.path)
        else:
            merged.append(group)
    return merged


def _units(
    root: ModuleSpec, groups: Sequence[_Group], slot_of: Mapping[str, tuple[int, int]]
) -> tuple[Unit, ...]:
    """Modules that get hooks: every group's, with tied parameters of other groups; and always the root."""
    module_of = {module.path: module for module in root.walk()}
    needs: dict[str, dict[int, None]] = {root.path: {}}
    for group in groups:
        for path in group.paths:
            module = module_of[path]
            below = module.walk() if group.is_block else [module]
            names = [name for part in below for name in part.parameters]
            needs.setdefault(path, {}).update(dict.fromkeys(slot_of[name][0] for name in names))
    return tuple(Unit(path=path, buckets=tuple(sorted(found))) for path, found in needs.items())


def _reduce_order(buckets: Sequence[BucketLayout], definition: Sequence[str]) -> tuple[int, ...]:
    """Backward completes a bucket when the parameter used first in forward has its gradient."""
    place = {name: index for index, name in enumerate(definition)}
    trainable = [bucket for bucket in buckets if bucket.trainable]
    trainable.sort(key=lambda bucket: (-min(place[slot.name] for slot in bucket.slots), bucket.index))
    return tuple(bucket.index for bucket in trainable)
