"""Command lines: those of the `deepspeed` command as they are, and one clear error for each that makes no sense."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest

from zeroshard.errors import LaunchError
from zeroshard.launch.options import build_parser, parse_options

DOCS = Path(__file__).parents[2] / "docs" / "launcher.md"


def parse(line: str, **defaults: object) -> dict[str, object]:
    return vars(parse_options(line.split(), **defaults))


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("t.py", {"script": "t.py", "script_args": [], "hostfile": "/job/hostfile", "num_gpus": None}),
        ("--num_gpus=8 t.py --deepspeed ds.json", {"num_gpus": 8, "script_args": ["--deepspeed", "ds.json"]}),
        ("--num_accelerators 2 t.py", {"num_gpus": 2}),
        ("-n 2 t.py -n 3", {"num_gpus": 2, "script_args": ["-n", "3"]}),
        ("--num_gpus -1 --num_nodes -1 t.py", {"num_gpus": None, "num_nodes": None}),
        ("--num_nodes 2 t.py", {"num_nodes": (2, 2)}),
        ("--num-nodes 1:4 --max-restarts 3 t.py", {"num_nodes": (1, 4), "max_restarts": 3}),
        ("-H h -i a:0,1@b t.py", {"hostfile": "h", "include": "a:0,1@b"}),
        ("--hostfile h -e a:0 t.py", {"exclude": "a:0"}),
        ("--master_addr 10.0.0.1 --master-port 29501 t.py", {"master_addr": "10.0.0.1", "master_port": 29501}),
        ("--no_ssh --node_rank=1 --num_nodes 2 t.py", {"no_ssh": True, "node_rank": 1}),
        ("--launcher OpenMPI --launcher_args=-x t.py", {"launcher": "openmpi", "launcher_args": ["-x"]}),
        ("--module --no_local_rank pkg.train x", {"module": True, "no_local_rank": True, "script": "pkg.train"}),
        ("--bind_core_list 0-3 t.py", {"bind_cores_to_rank": True, "bind_core_list": "0-3"}),
        ("-q t.py", {"log_level": "error"}),
        ("--log_level WARNING t.py", {"log_level": "warning"}),
        ("--autotuning= t.py", {"script": "t.py"}),
        ("--num_gpu 4 t.py", {"num_gpus": 4}),  # an abbreviation
        ("--enable_each_rank_log None t.py", {"enable_each_rank_log": None}),
        ("-- t.py -q", {"script": "t.py", "script_args": ["-q"]}),
        ("-q -- t.py -- -q", {"script": "t.py", "script_args": ["--", "-q"]}),
        (
            "--force_multi --ssh_port 2222 --no_ssh_check --save_pid --venv_script v --enable_each_rank_log d t.py",
            {"force_multi": True, "ssh_port": 2222, "no_ssh_check": True, "save_pid": True, "venv_script": "v",
             "enable_each_rank_log": "d"},
        ),
    ],
)  # fmt: skip
def test_command_lines(line: str, expected: dict[str, object]) -> None:
    parsed = parse(line)
    assert {name: parsed[name] for name in expected} == expected


@pytest.mark.parametrize(
    "words", ["-- --x", "--save out --log debug", "--n 3 --m --no --max 2", "--num_gpu 3", "-n 3 -q -mx"]
)
def test_what_follows_the_script_is_the_scripts(words: str) -> None:
    """Also a word that an option of ours begins with, or several, or the `--` that comes first."""
    parsed = parse(f"--num_gpus 2 t.py {words}")
    assert (parsed["num_gpus"], parsed["script_args"]) == (2, words.split())


def test_local_rank_is_passed_only_by_the_command_that_always_did() -> None:
    deepspeed = {"pass_local_rank": True, "as_deepspeed": True}
    assert parse("t.py")["pass_local_rank"] is False
    assert parse("t.py", **deepspeed)["pass_local_rank"] is True
    assert parse("--no_local_rank t.py", **deepspeed)["pass_local_rank"] is False
    assert parse("t.py")["as_deepspeed"] is None
    assert parse("--no-as-deepspeed t.py", **deepspeed)["as_deepspeed"] is False


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("", "give a script to run"),
        ("--nodes 2 t.py", "--nodes"),
        ("--master x t.py", "--master"),  # the address or the port?
        ("--num_gpus 2 --", "give a script to run"),
        ("-i a -e b t.py", "--include and --exclude exclude each other"),
        ("-i a --num_gpus 2 t.py", "--include says which hosts and slots; --num_gpus says it again"),
        ("-e a --num_nodes 2 t.py", "--exclude says which hosts and slots; --num_nodes says it again"),
        ("--module --no_python t.py", "--module and --no_python exclude each other"),
        ("--num_gpus 0 t.py", "'0' is not a whole number of at least 1"),
        ("--num_nodes 4:2 t.py", "'4:2' is neither N nor MIN:MAX"),
        ("--num_nodes x t.py", "'x' is not a whole number"),
        ("--master_port 99999 t.py", "'99999' is not a port"),
        ("--launcher slurmy t.py", "'slurmy' is none of ssh, pdsh, openmpi, mpich, impi, mvapich, slurm"),
        ("--slots 0 t.py", "--slots goes with --no_ssh"),
        ("--no_ssh --slots 0,0 t.py", "names a slot twice"),
        ("--autotuning run t.py", "--autotuning: tuning by trial runs is not there"),
        ("--elastic_training t.py", "--elastic_training: give the bounds to torch's elastic agent"),
        ("--max_elastic_nodes 3 t.py", "--max_elastic_nodes: give the bounds"),
    ],
)
def test_a_command_line_that_makes_no_sense_is_one_clear_error(line: str, told: str) -> None:
    with pytest.raises(LaunchError) as error:
        parse(line)
    assert told in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("--num-gpus 0 t.py", "--num-gpus: '0' is not a whole number of at least 1"),
        ("--num_accel=0 t.py --nproc 2", "--num_accelerators: '0' is not a whole number of at least 1"),
        ("-n 0 t.py", "-n: '0' is not a whole number of at least 1"),
        ("-n0 t.py", "-n: '0' is not a whole number of at least 1"),
        ("--hostfile", "--hostfile: expected one argument"),
        ("--no_ssh --slots a t.py", "--slots: 'a' is not a list of slots such as 0,2"),
    ],
)
def test_an_error_names_the_option_as_it_was_written(line: str, told: str) -> None:
    with pytest.raises(LaunchError) as error:
        parse(line)
    assert str(error.value) == told


def test_every_option_is_in_the_documentation() -> None:
    documented = set(re.findall(r"--[a-z_]+", DOCS.read_text()))
    for action in build_parser()._actions:
        long = [name for name in action.option_strings if name.startswith("--") and "-" not in name[2:]]
        if long and action.dest != "help" and action.help != argparse.SUPPRESS:
            assert set(long) & documented, long
