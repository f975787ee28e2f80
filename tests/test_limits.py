"""The sizes of the config are bounds of every plan, whatever the model and the path it takes."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from zeroshard.layout import Layout, ModuleSpec, ParameterSpec, plan_layout
from zeroshard.leaves import MAX_LEAF, leaves_by_granularity
from zeroshard.policy import Policy
from zeroshard.schedule import Schedule, compile_schedule
from zeroshard.trace import POINTS, Action, Kind

SIZES = (1, 3, 16, 64, 100, 500)


@st.composite
def models(draw: st.DrawFn) -> tuple[ModuleSpec, list[ParameterSpec]]:
    """A tree of up to three levels with lists of repeated blocks, parameters of any size, frozen and tied ones."""
    specs: list[ParameterSpec] = []

    def parameters(path: str) -> tuple[str, ...]:
        names = []
        for index in range(draw(st.integers(0, 2))):
            if specs and draw(st.integers(0, 9)) == 0:
                names.append(draw(st.sampled_from(specs)).name)  # tied
                continue
            shape = (draw(st.sampled_from(SIZES)),)
            spec = ParameterSpec(
                name=f"{path}.p{index}",
                shape=shape,
                dtype=draw(st.sampled_from(["float32", "float32", "bfloat16"])),
                trainable=draw(st.integers(0, 4)) > 0,
            )
            specs.append(spec)
            names.append(spec.name)
        return tuple(dict.fromkeys(names))

    def module(path: str, depth: int) -> ModuleSpec:
        is_list = depth > 0 and draw(st.booleans())
        own = () if is_list else parameters(path)
        count = draw(st.integers(0, 3)) if depth else 0
        children = tuple(module(f"{path}.{i}" if path else str(i), depth - 1) for i in range(count))
        return ModuleSpec(
            path=path,
            type_name="torch.nn.modules.container.ModuleList" if is_list else f"Module{depth}",
            parameters=own,
            children=children,
            is_sequence=is_list,
        )

    root = module("", 3)
    extra = ParameterSpec(name="last", shape=(7,), dtype="float32", trainable=True)
    children = (*root.children, ModuleSpec(path="tail", type_name="Tail", parameters=("last",)))
    return ModuleSpec(path="", type_name="Root", parameters=root.parameters, children=children), [
        *specs,
        extra,
    ]


@st.composite
def traces(draw: st.DrawFn, layout: Layout) -> tuple[Action, ...]:
    """Units that run nested, repeated, skipped; backwards in any order, some with a recomputed forward, some
    without an end."""
    units = [unit.buckets for unit in layout.units if unit.buckets]
    points: list[Action] = []
    if not units:
        return ()
    order = draw(st.lists(st.integers(0, len(units) - 1), min_size=1, max_size=8))
    for index in order:
        inner = draw(st.none() | st.integers(0, len(units) - 1))
        points += [Action(Kind.FORWARD, bucket) for bucket in units[index]]
        if inner is not None:
            points += [Action(Kind.FORWARD, bucket) for bucket in units[inner]]
            points += [Action(Kind.END_FORWARD, bucket) for bucket in units[inner]]
        points += [Action(Kind.END_FORWARD, bucket) for bucket in units[index]]
    for index in draw(st.permutations(order)) if draw(st.booleans()) else []:
        points += [Action(Kind.BACKWARD, bucket) for bucket in units[index]]
        if draw(st.booleans()):
            points += [Action(Kind.FORWARD, bucket) for bucket in units[index]]
            points += [Action(Kind.END_FORWARD, bucket) for bucket in units[index]]
        if draw(st.booleans()):
            points += [Action(Kind.END_BACKWARD, bucket) for bucket in units[index]]
    return tuple(points)


limits = st.fixed_dictionaries(
    {
        "persistence_threshold": st.sampled_from([0, 3, 64, 1000]),
        "model_persistence_threshold": st.sampled_from([0, 50, 300, 10_000]),
        "max_live": st.sampled_from([0, 1, 100, 700, 2000, 100_000]),
        "prefetch": st.sampled_from([0, 1, 100, 1000, 100_000]),
        "max_reuse_distance": st.sampled_from([0, 50, 500, 100_000]),
    }
)


@settings(max_examples=400)
@given(data=st.data(), model=models(), sizes=limits, world=st.sampled_from([2, 4]))
def test_every_plan_keeps_to_the_sizes(
    data: st.DataObject,
    model: tuple[ModuleSpec, list[ParameterSpec]],
    sizes: dict[str, int],
    world: int,
) -> None:
    root, specs = model
    policy = Policy.of_stage(3, world, **sizes)
    layout = plan_layout(root, specs, policy)
    held = sum(bucket.numel for bucket in layout.buckets if bucket.resident)
    assert held <= policy.model_persistence_threshold
    schedule = compile_schedule(data.draw(traces(layout)), layout, policy)
    check_bounds(schedule, layout, policy)


def check_bounds(schedule: Schedule, layout: Layout, policy: Policy) -> None:
    """Walk the actions with the rules in mind, written down anew."""
    numel = {bucket.index: bucket.padded for bucket in layout.buckets}
    gathered: set[int] = set()
    flying: set[int] = set()
    forwards: dict[int, int] = {}
    backwards: set[int] = set()
    actions = schedule.actions
    for place, (kind, bucket) in enumerate(actions):
        if kind is Kind.GATHER:
            gathered.add(bucket)
            flying.add(bucket)
            ahead = sum(numel[b] for b in flying)
            assert ahead <= policy.prefetch + max(numel[b] for b in flying)
            live = sum(numel[b] for b in gathered)
            used = {b for b, count in forwards.items() if count} | backwards | {bucket}
            in_use = sum(numel[b] for b in used & gathered)
            assert live <= max(policy.max_live, in_use)
            if live > policy.max_live:  # nothing was fetched ahead of its time
                assert next(a for a in actions[place:] if a.kind in POINTS).bucket == bucket
        elif kind is Kind.WAIT:
            flying.discard(bucket)
        elif kind is Kind.FREE:
            gathered.discard(bucket)
        elif kind is Kind.FORWARD:
            forwards[bucket] = forwards.get(bucket, 0) + 1
        elif kind is Kind.END_FORWARD:
            forwards[bucket] -= 1
        elif kind is Kind.BACKWARD:
            backwards.add(bucket)
        elif kind is Kind.END_BACKWARD:
            backwards.discard(bucket)
    check_reuse(actions, numel, policy.max_reuse_distance)


def check_reuse(actions: tuple[Action, ...], numel: dict[int, int], distance: int) -> None:
    """Between two uses of a bucket that stays gathered, no more than `distance` elements of others begin, unless
    a gather was launched ahead in between."""
    last_end: dict[int, int] = {}
    gather_at: dict[int, int] = {}
    open_uses: dict[int, int] = {}
    for place, (kind, bucket) in enumerate(actions):
        if kind is Kind.GATHER:
            gather_at[bucket] = place
        elif kind in (Kind.FORWARD, Kind.BACKWARD):
            kept = bucket in last_end and gather_at.get(bucket, place) < last_end[bucket]
            if kept and not open_uses.get(bucket):
                between = actions[last_end[bucket] + 1 : place]
                begun = sum(
                    numel[b] for k, b in between if k in (Kind.FORWARD, Kind.BACKWARD) and b != bucket
                )
                assert begun <= distance
            open_uses[bucket] = open_uses.get(bucket, 0) + 1
        elif kind in (Kind.END_FORWARD, Kind.END_BACKWARD):
            open_uses[bucket] = max(open_uses.get(bucket, 0) - 1, 0)
            last_end[bucket] = place


# ---- leaves ---------------------------------------------------------------------------------------------


def tree() -> tuple[ModuleSpec, dict[str, int]]:
    """A root with a list of two blocks, each an attention of two linears and a norm; 10 elements a parameter."""

    def linear(path: str) -> ModuleSpec:
        return ModuleSpec(
            path=path, type_name="torch.nn.modules.linear.Linear", parameters=(f"{path}.weight",)
        )

    def block(path: str) -> ModuleSpec:
        attention = ModuleSpec(
            path=f"{path}.attn",
            type_name="Attention",
            children=(linear(f"{path}.attn.q"), linear(f"{path}.attn.o")),
        )
        silent = ModuleSpec(path=f"{path}.act", type_name="torch.nn.modules.activation.GELU")
        return ModuleSpec(path=path, type_name="Block", children=(attention, silent, linear(f"{path}.norm")))

    blocks = tuple(block(f"blocks.{i}") for i in range(2))
    listed = ModuleSpec(
        path="blocks", type_name="torch.nn.modules.container.ModuleList", children=blocks, is_sequence=True
    )
    root = ModuleSpec(path="", type_name="Root", children=(listed, linear("head")), parameters=("scale",))
    numel = {name: 10 for part in root.walk() for name in part.parameters}
    numel["head.weight"], numel["scale"] = 1000, 10
    return root, numel


def leaves(threshold: int) -> tuple[set[str], tuple[str, int] | None]:
    root, numel = tree()
    marked, smallest = leaves_by_granularity(root, numel, threshold)
    assert [m.path for m in marked.walk()] == [m.path for m in root.walk()]
    return {module.path for module in marked.walk() if module.is_leaf}, smallest


def test_the_first_module_from_the_root_that_is_fine_enough_is_a_leaf() -> None:
    # attention: 20 elements over itself and 2 linears; block: 30 over 5; root: 1070 over 12 (lists do not count).
    assert leaves(5) == (set(), ("blocks.0.attn", 6))
    assert leaves(6)[0] == {"blocks.0", "blocks.1"}
    assert leaves(88)[0] == {"blocks.0", "blocks.1"}
    assert leaves(89)[0] == {""}


def test_what_never_becomes_a_leaf() -> None:
    root, numel = tree()
    marked, _ = leaves_by_granularity(root, {**numel, "head.weight": MAX_LEAF}, 10 * MAX_LEAF)
    assert {m.path for m in marked.walk() if m.is_leaf} == {"blocks.0", "blocks.1"}  # the root is too large


def test_leaves_that_were_named_are_not_looked_into() -> None:
    root, numel = tree()
    named = ModuleSpec(
        path="",
        type_name="Root",
        parameters=("scale",),
        children=(
            root.children[1],
            *(ModuleSpec(**{**vars(b), "is_leaf": True}) for b in root.children[0].children),
        ),
    )
    assert leaves_by_granularity(named, numel, 6)[0] == named


def test_a_leaf_is_one_bucket() -> None:
    root, numel = tree()
    specs = [
        ParameterSpec(name=name, shape=(size,), dtype="float32", trainable=True)
        for name, size in numel.items()
    ]
    policy = Policy.of_stage(3, 2, persistence_threshold=0, max_live=20)
    before = plan_layout(root, specs, policy)
    after = plan_layout(leaves_by_granularity(root, numel, 6)[0], specs, policy)
    assert [b.numel for b in after.buckets] == [10, 30, 30, 1000]
    assert len(before.buckets) > len(after.buckets)
