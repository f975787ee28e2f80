"""Hostfiles, filters, slots and SLURM's node lists: pure functions."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeroshard.errors import LaunchError
from zeroshard.launch.hosts import (
    Hosts,
    expand_nodelist,
    first_hosts,
    parse_hostfile,
    select_hosts,
    visible_devices,
)

POOL: Hosts = {"worker-2": (0, 1, 2, 3), "worker-1": (0, 1, 2, 3), "10.0.0.7": (0, 1)}


def test_a_hostfile_keeps_its_order() -> None:
    text = (
        "\n# two kinds\nworker-2 slots=4\n  worker-1   slots = 4  # new\r\n\r\n10.0.0.7 slots=2 max_slots=8"
    )
    assert list(parse_hostfile(text, "f").items()) == list(POOL.items())


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "f names no host"),
        ("# nothing\n\n", "f names no host"),
        ("a slots=2\nb\n", "f, line 2: 'b' is not of the form 'host slots=N'"),
        ("a 2", "line 1: 'a 2' is not of the form"),
        ("a slots=two", "line 1: 'a slots=two' is not of the form"),
        ("a slots=-1", "is not of the form"),
        ("a slots=2 b slots=2", "is not of the form"),
        ("-oProxyCommand=x slots=1", "is not of the form"),  # ssh would take it for an option
        ("a,b slots=1", "is not of the form"),  # pdsh would take it for two
        ("@a slots=1", "is not of the form"),
        ("a slots=1000000", "line 1: host 'a' has 1000000 slots; at most 4096"),
        ("a slots=1000000000000", "is not of the form"),
        ("a slots=0", "line 1: host 'a' has 0 slots"),
        ("a slots=2\n\na slots=4", "f, line 3: host 'a' is there twice"),
        ("me@a slots=2\nme@A slots=4", "f, line 2: host 'me@A' is there twice"),
    ],
)
def test_a_bad_line_is_named(text: str, told: str) -> None:
    with pytest.raises(LaunchError) as error:
        parse_hostfile(text, "f")
    assert told in str(error.value)


@pytest.mark.parametrize(
    ("include", "exclude", "chosen"),
    [
        ("worker-1@worker-2", "", {"worker-2": (0, 1, 2, 3), "worker-1": (0, 1, 2, 3)}),
        ("worker-1:3,1@10.0.0.7", "", {"worker-1": (3, 1), "10.0.0.7": (0, 1)}),
        ("", "worker-2", {"worker-1": (0, 1, 2, 3), "10.0.0.7": (0, 1)}),
        ("", "worker-2@10.0.0.7:0@worker-1:0,2", {"worker-1": (1, 3), "10.0.0.7": (1,)}),
        ("", "10.0.0.7:0,1", {"worker-2": (0, 1, 2, 3), "worker-1": (0, 1, 2, 3)}),
    ],
)
def test_filters(include: str, exclude: str, chosen: Hosts) -> None:
    assert list(select_hosts(POOL, include, exclude).items()) == list(chosen.items())


def test_users_in_a_filter() -> None:
    pool: Hosts = {"me@a": (0, 1), "b": (0, 1), "you@fd00::1": (0, 1)}
    assert select_hosts(pool, include="me@a") == {"me@a": (0, 1)}
    assert select_hosts(pool, include="b:1@you@fd00::1:0@me@a:1") == {
        "me@a": (1,),
        "b": (1,),
        "you@fd00::1": (0,),
    }
    assert select_hosts(pool, exclude="me@a:0@b") == {"me@a": (1,), "you@fd00::1": (0, 1)}
    with pytest.raises(LaunchError, match="no host 'me@c' among me@a, b"):
        select_hosts(pool, include="me@c")


def test_addresses_with_colons_in_a_filter() -> None:
    pool: Hosts = {"fd00::1": (0, 1), "fd00::2": (0, 1)}
    assert select_hosts(pool, include="fd00::2:1@fd00::1") == {"fd00::1": (0, 1), "fd00::2": (1,)}
    with pytest.raises(LaunchError, match="no host 'fd00:'"):
        select_hosts(pool, include="fd00::3")


@pytest.mark.parametrize(
    ("include", "exclude", "told"),
    [
        ("worker-9", "", "--include 'worker-9': no host 'worker-9' among worker-2, worker-1, 10.0.0.7"),
        ("worker-1:4", "", "host 'worker-1' has no slot 4; it has 0,1,2,3"),
        ("", "worker-1:7", "--exclude 'worker-1:7': host 'worker-1' has no slot 7"),
        ("worker-1:", "", "'' is not a list of slots"),
        ("worker-1:a", "", "'a' is not a list of slots"),
        ("worker-1:1,1", "", "names a slot twice"),
        ("worker-1@worker-1", "", "is there twice"),
        ("worker-1@", "", "a host is missing"),
        ("", "worker-1@worker-2@10.0.0.7", "leaves no slot"),
        ("worker-1", "worker-2", "exclude each other"),
    ],
)
def test_a_bad_filter_is_one_clear_error(include: str, exclude: str, told: str) -> None:
    with pytest.raises(LaunchError) as error:
        select_hosts(POOL, include, exclude)
    assert told in str(error.value)


@st.composite
def pools_and_parts(draw: st.DrawFn) -> tuple[Hosts, Hosts]:
    names = draw(st.lists(st.from_regex(r"[a-z][a-z0-9.-]{0,6}", fullmatch=True), min_size=1, unique=True))
    pool = {name: tuple(range(draw(st.integers(1, 5)))) for name in names}
    chosen = draw(st.lists(st.sampled_from(names), min_size=1, unique=True))
    part = {
        name: tuple(draw(st.lists(st.sampled_from(pool[name]), min_size=1, unique=True))) for name in chosen
    }
    return pool, part


@given(pools_and_parts())
def test_include_and_exclude_are_the_two_sides_of_one_filter(both: tuple[Hosts, Hosts]) -> None:
    pool, part = both
    text = "@".join(f"{host}:{','.join(map(str, slots))}" for host, slots in part.items())
    inside = select_hosts(pool, include=text)
    assert inside == part  # what was named, in the order in which slots were written
    assert list(inside) == [host for host in pool if host in part]  # hosts in the order of the file
    everything = {(host, slot) for host, slots in pool.items() for slot in slots}
    kept = {(host, slot) for host, slots in inside.items() for slot in slots}
    if kept == everything:
        with pytest.raises(LaunchError):
            select_hosts(pool, exclude=text)
        return
    outside = select_hosts(pool, exclude=text)
    assert {(host, slot) for host, slots in outside.items() for slot in slots} == everything - kept
    assert list(outside) == [host for host in pool if host in outside]
    assert all(slots == tuple(sorted(slots)) for slots in outside.values())


def test_the_first_hosts_and_slots() -> None:
    assert first_hosts(POOL, 2, 1) == {"worker-2": (0,), "worker-1": (0,)}
    assert first_hosts(POOL, None, None) == POOL
    with pytest.raises(LaunchError, match="--num_nodes 4: there are 3 hosts"):
        first_hosts(POOL, 4, None)
    assert first_hosts(POOL, 2, 4) == {
        "worker-2": (0, 1, 2, 3),
        "worker-1": (0, 1, 2, 3),
    }  # not of the others
    with pytest.raises(LaunchError, match=r"--num_gpus 3: host '10\.0\.0\.7' has 2 slots"):
        first_hosts(POOL, None, 3)


@pytest.mark.parametrize(
    ("slots", "visible", "count", "devices"),
    [
        ((0, 1), "4,5", 2, "4,5"),
        ((0, 1), "5,4", 2, "5,4"),  # the order of the user
        ((0, 1), "0,2", 2, "0,2"),
        ((1,), "4,5", 2, "5"),  # a filter counts what is visible
        ((1, 0), "0,2", 2, "2,0"),
        ((0,), "GPU-8932f937", 1, "GPU-8932f937"),
        ((0, 1), None, 2, None),  # all there are: nothing has to be said
        ((0, 1), None, 8, "0,1"),
        ((3, 1), None, 8, "3,1"),
        ((0, 1, 2, 3), "", 0, None),  # on a CPU a slot is a number
        ((5, 7), "4,5", 0, None),
    ],
)
def test_visible_devices(
    slots: tuple[int, ...], visible: str | None, count: int, devices: str | None
) -> None:
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert visible_devices(slots, environ, "CUDA_VISIBLE_DEVICES", count) == devices


@pytest.mark.parametrize(
    ("slots", "visible", "count", "told"),
    [
        ((0, 1, 2), None, 2, "slot 2 (of 3 ranks here) has no accelerator: this machine shows 2"),
        ((0, 1, 2), "4,5", 2, "this machine shows 2 (CUDA_VISIBLE_DEVICES=4,5)"),
        ((0, 1), "0,9", 1, "CUDA_VISIBLE_DEVICES=0,9 names 2 devices, of which 1 can be seen here"),
    ],
)
def test_devices_that_are_not_there(
    slots: tuple[int, ...], visible: str | None, count: int, told: str
) -> None:
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    with pytest.raises(LaunchError) as error:
        visible_devices(slots, environ, "CUDA_VISIBLE_DEVICES", count)
    assert told in str(error.value)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("n1", ["n1"]),
        ("n1,n3", ["n1", "n3"]),
        ("gpu[08-10,12],login", ["gpu08", "gpu09", "gpu10", "gpu12", "login"]),
        ("a[1-2]-ib,b[7]", ["a1-ib", "a2-ib", "b7"]),
    ],
)
def test_slurms_node_lists(text: str, hosts: list[str]) -> None:
    assert expand_nodelist(text) == hosts


@pytest.mark.parametrize("text", ["n[1-", "n[a-b]", "n]1", ","])
def test_a_node_list_that_cannot_be_read(text: str) -> None:
    with pytest.raises(LaunchError, match="SLURM's node list"):
        expand_nodelist(text)
