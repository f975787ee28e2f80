"""Which hosts, meeting where, and the place of one of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from zeroshard.errors import LaunchError
from zeroshard.launch.options import parse_options
from zeroshard.launch.plan import (
    Place,
    choose_hosts,
    is_this_machine,
    master_of,
    node_bounds,
    place_in_slurm,
    place_of,
    plan_job,
)


@pytest.fixture
def hostfile(tmp_path: Path) -> str:
    (tmp_path / "hosts").write_text("a slots=2\nb slots=4\nc slots=2\n")
    return str(tmp_path / "hosts")


@pytest.mark.parametrize(
    ("words", "hosts"),
    [
        ([], {"a": (0, 1), "b": (0, 1, 2, 3), "c": (0, 1)}),
        (["--num_nodes", "2", "--num_gpus", "1"], {"a": (0,), "b": (0,)}),
        (["-i", "c@b:3,0"], {"b": (3, 0), "c": (0, 1)}),
        (["-e", "b@a:1"], {"a": (0,), "c": (0, 1)}),
        (["--num_nodes", "1:2"], {"a": (0, 1), "b": (0, 1, 2, 3)}),
        (["--num_nodes", "2:9"], {"a": (0, 1), "b": (0, 1, 2, 3), "c": (0, 1)}),
    ],
)
def test_hosts(hostfile: str, words: list[str], hosts: dict[str, tuple[int, ...]]) -> None:
    assert choose_hosts(parse_options(["-H", hostfile, *words, "t.py"]), {}) == hosts


def test_a_hostfile_of_another_system(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_bytes(b"\xef\xbb\xbfa slots=1\r\nb slots=2\r\n")
    options = parse_options(["-H", str(tmp_path / "hosts"), "t.py"])
    assert choose_hosts(options, {}) == {"a": (0,), "b": (0, 1)}


def test_more_hosts_than_there_are(hostfile: str) -> None:
    for count in ("4", "4:6"):
        with pytest.raises(LaunchError, match="--num_nodes 4: there are 3 hosts, a, b, c"):
            choose_hosts(parse_options(["-H", hostfile, "--num_nodes", count, "t.py"]), {})
    for count in ("2", "1:2"):
        with pytest.raises(LaunchError, match="--num_nodes 2 needs a hostfile"):
            choose_hosts(parse_options(["-H", "absent", "--num_nodes", count, "t.py"]), {})
    assert choose_hosts(parse_options(["-H", "absent", "t.py"]), {}) is None


def test_where_ranks_meet() -> None:
    options = parse_options(["t.py"])
    assert master_of(options, {"me@a": (0,), "b": (0,)}) == "a"
    assert master_of(parse_options(["--master_addr", "x", "t.py"]), {"a": (0,), "b": (0,)}) == "x"
    with pytest.raises(LaunchError, match="'localhost' is the first host"):
        master_of(options, {"localhost": (0,), "b": (0,)})


@pytest.mark.parametrize(
    ("words", "place"),
    [
        ("", Place()),
        ("--master_port 1234", Place(port=1234)),
        ("--node_rank 1 --num_nodes 2 --master_addr a", Place(1, 2, 2, "a", 29500)),
        ("--node_rank 3 --num_nodes 1:4 --master_addr a --master_port 5", Place(3, 1, 4, "a", 5)),
    ],
)
def test_a_place_by_hand(words: str, place: Place) -> None:
    assert place_of(parse_options(["--no_ssh", *words.split(), "t.py"]), {}, None) == place


def test_a_place_from_the_hostfile() -> None:
    options = parse_options(["--no_ssh", "--node_rank", "1", "t.py"])
    assert place_of(options, {}, {"a": (0,), "b": (0, 1)}) == Place(1, 2, 2, "a", 29500)


def test_hosts_that_come_and_go_are_those_of_the_hostfile(hostfile: str) -> None:
    """torch would wait for a fourth one at every start, and node rank 3 would have no line."""
    options = parse_options(["-H", hostfile, "--num_nodes", "2:9", "t.py"])
    hosts = choose_hosts(options, {})
    assert hosts is not None
    assert node_bounds(options, hosts) == (2, 3)
    assert all(
        "--num_nodes=2:3" in command.words for command in plan_job(options, hosts, "pdsh", {}).commands
    )
    by_hand = parse_options(["-H", hostfile, "--num_nodes", "2:9", "--no_ssh", "--node_rank", "3", "t.py"])
    with pytest.raises(LaunchError, match="--node_rank 3 is out of range"):
        place_of(by_hand, {}, hosts)
    with pytest.raises(LaunchError, match="srun ends all hosts when one is lost"):
        plan_job(options, hosts, "slurm", {})


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            "--num_nodes 2 --master_addr a",
            "--node_rank is missing: with --no_ssh and 2 hosts it is a number from 0 to 1",
        ),
        ("--num_nodes 2 --node_rank 2 --master_addr a", "--node_rank 2 is out of range"),
        ("--num_nodes 2 --node_rank 1", "--master_addr is missing"),
    ],
)
def test_a_place_that_cannot_be(words: str, told: str) -> None:
    with pytest.raises(LaunchError, match=told):
        place_of(parse_options(["--no_ssh", *words.split(), "t.py"]), {}, None)


STEP = {"SLURM_STEP_NODELIST": "n[2-3]", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"}


def test_a_place_from_srun() -> None:
    assert place_in_slurm(STEP) == Place(1, 2, 2, "n2", 29500)
    assert place_in_slurm({}) is None
    assert place_in_slurm(STEP | {"SLURM_STEP_NUM_TASKS": "1"}) is None
    options = parse_options(["--no_ssh", "--master_port", "7", "t.py"])
    assert place_of(options, STEP, None) == Place(1, 2, 2, "n2", 7)
    with pytest.raises(LaunchError, match="start one per host, with --ntasks-per-node=1"):
        place_in_slurm(STEP | {"SLURM_STEP_NUM_TASKS": "8"})


def test_this_machine() -> None:
    assert is_this_machine("localhost")
    assert is_this_machine("me@127.0.0.1")
    assert not is_this_machine("192.0.2.1")
    assert not is_this_machine("no-such-host.invalid")
