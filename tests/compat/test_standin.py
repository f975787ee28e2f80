"""The package `deepspeed` that zeroshard supplies: its names, its metadata, and what it costs to import."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

import zeroshard.compat
from zeroshard.compat.modules import absent, reason_for, resolve
from zeroshard.compat.names import ABSENT, COMMANDS, MODULES
from zeroshard.errors import NotYetError

if sys.version_info >= (3, 11):
    import tomllib
else:  # which pytest brings
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
STANDIN = str(zeroshard.compat.standin_directory())


def run(code: str, *, path: str = STANDIN, **env: str) -> subprocess.CompletedProcess[str]:
    """Python code in a process of its own that has `path` in front, and the stand-in only if that is it."""
    here = os.pathsep.join([path, *(entry for entry in sys.path if entry not in ("", STANDIN))])
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, "PYTHONPATH": here, **env},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize("module", MODULES)
def test_every_name_has_a_home(module: str) -> None:
    for home in MODULES[module].values():
        if not home.startswith("deepspeed."):
            assert resolve(home) is not None


@pytest.mark.parametrize("command", COMMANDS.values())
def test_every_command_has_a_home(command: str) -> None:
    assert callable(resolve(command))


def test_import_is_quiet_and_imports_nothing() -> None:
    """CASES 112: 0 bytes, no subprocess, no torch, no warning; also where a loader's worker imports it."""
    done = run(
        """
        import sys
        started = []
        sys.addaudithook(lambda event, args: started.append(event) if event in (
            "subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system") else None)
        import deepspeed
        import deepspeed.runtime.zero.partition_parameters, deepspeed.moe.layer
        assert "torch" not in sys.modules and "pydantic" not in sys.modules
        assert not started, started
        import torch
        started.clear()  # torch's own, from 2.14 on
        from deepspeed import DeepSpeedEngine, zero, comm
        deepspeed.utils.logger.info("nobody listens")
        assert not started, started
        """,
        PYTHONWARNINGS="error",
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_metadata_that_clients_look_for() -> None:
    done = run(
        """
        import importlib.metadata as metadata, importlib.util
        from packaging.version import Version
        assert importlib.util.find_spec("deepspeed") is not None
        assert metadata.metadata("deepspeed")["Name"] == "deepspeed"
        assert Version(metadata.version("deepspeed")) >= Version("0.18.2")
        import deepspeed
        assert deepspeed.__version__ == metadata.version("deepspeed")
        assert metadata.requires("deepspeed") is None
        """
    )
    assert done.returncode == 0, done.stderr


def test_import_of_the_module_activates_it() -> None:
    done = run(
        """
        import zeroshard.compat.deepspeed as first
        import deepspeed, importlib.metadata
        import zeroshard.compat.deepspeed as second
        assert first is deepspeed is second
        assert importlib.metadata.version("deepspeed") == deepspeed.__version__
        """,
        path=str(ROOT / "src"),
    )
    assert done.returncode == 0, done.stderr


def real(tmp_path: Path) -> str:
    """Something like a real deepspeed."""
    (tmp_path / "deepspeed").mkdir()
    (tmp_path / "deepspeed" / "__init__.py").write_text("__version__ = '0.17.0'\n")
    metadata = tmp_path / "deepspeed-0.17.0.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: deepspeed\nVersion: 0.17.0\n")
    return str(tmp_path)


def test_a_real_deepspeed_is_seen_and_not_replaced_once_imported(tmp_path: Path) -> None:
    done = run(
        """
        import zeroshard.compat
        assert zeroshard.compat.real_deepspeed_installed()
        import deepspeed
        try:
            zeroshard.compat.activate()
        except zeroshard.errors.ZeroShardError as error:
            print(error)
        """,
        path=real(tmp_path),
    )
    assert done.returncode == 0, done.stderr
    assert "imported already" in done.stdout
    assert "zeroshard run --as-deepspeed" in done.stdout


def test_it_goes_before_a_real_one_and_is_none_itself(tmp_path: Path) -> None:
    both = os.pathsep.join([STANDIN, real(tmp_path)])
    assert run("import deepspeed; assert 'zeroshard' in deepspeed.__version__", path=both).returncode == 0
    alone = run("import zeroshard.compat as c; assert not c.real_deepspeed_installed()")
    assert alone.returncode == 0, alone.stderr


def test_a_folder_of_configs_with_that_name_is_no_package(tmp_path: Path) -> None:
    (tmp_path / "deepspeed").mkdir()
    alone = run("import zeroshard.compat as c; assert not c.real_deepspeed_installed()", path=str(tmp_path))
    assert alone.returncode == 0, alone.stderr


def test_what_is_absent_says_so_at_use() -> None:
    done = run(
        """
        from zeroshard.errors import NotYetError
        import deepspeed
        from deepspeed.moe.layer import MoE
        from deepspeed.inference.v2.engine_factory import build_hf_engine
        from deepspeed.compression.compress import init_compression

        class Mine(MoE):
            pass

        assert not isinstance(3, deepspeed.PipelineModule)
        for use in (Mine, build_hf_engine, init_compression, deepspeed.init_inference, deepspeed.tp_model_init):
            try:
                use(1, key=2)
            except NotYetError as error:
                print(error)
            else:
                raise AssertionError(use)
        """
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 5
    assert lines[0].startswith("deepspeed.moe.layer.MoE is not in zeroshard: it is planned")
    assert "vLLM" in lines[1]
    assert "torchao" in lines[2]


def test_a_typing_error_is_one() -> None:
    done = run(
        """
        import deepspeed
        try:
            deepspeed.initialise
        except AttributeError as error:
            print(error)
        try:
            import deepspeed.nothing_of_the_kind
        except ModuleNotFoundError as error:
            print(error)
        try:
            deepspeed.zero.__wrapped__
        except AttributeError as error:
            print("dunder")
        """
    )
    assert done.stdout.splitlines() == [
        "module 'deepspeed' of zeroshard's stand-in for deepspeed has no attribute 'initialise'; did you mean "
        "'initialize'?",
        "No module named 'deepspeed.nothing_of_the_kind'",
        "dunder",
    ], done.stderr


def test_patches_reach_everybody() -> None:
    """Clients' test-suites replace names; `deepspeed.zero` and its long name are one module."""
    done = run(
        """
        from unittest import mock
        import deepspeed, deepspeed.runtime.zero
        with mock.patch("deepspeed.zero.Init") as init, mock.patch("deepspeed.initialize") as initialize:
            assert deepspeed.runtime.zero.Init is init
            assert deepspeed.initialize is initialize
        assert mock.Mock(spec=deepspeed.DeepSpeedEngine).modules
        assert deepspeed.checkpointing is deepspeed.runtime.activation_checkpointing.checkpointing
        """
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("module", ["deepspeed.utils.zero_to_fp32", "deepspeed.checkpoint.ds_to_universal"])
def test_modules_that_are_run(module: str) -> None:
    done = run(
        f"import runpy, sys; sys.argv[1:] = ['--help']; runpy.run_module({module!r}, run_name='__main__')"
    )
    assert done.returncode == 0, done.stderr
    assert "--max_shard_size" in done.stdout or "nothing to convert" in done.stdout


def test_reasons_are_found_upwards() -> None:
    assert reason_for("deepspeed.moe.layer.MoE") == ABSENT["deepspeed.moe"]
    assert reason_for("deepspeed.runtime.pipe.engine") == ABSENT["deepspeed.runtime.pipe"]
    assert reason_for("torch.nn") is None
    with pytest.raises(NotYetError, match=r"a\.B is not in zeroshard: because"):
        absent("a", "B", "because")()


# ---- the distribution of that name ----------------------------------------------------------------------


def distribution() -> dict[str, Any]:
    project: dict[str, Any] = tomllib.loads((ROOT / "compat" / "deepspeed" / "pyproject.toml").read_text())
    return project["project"]


def test_the_distribution_has_the_commands_and_the_version() -> None:
    project = distribution()
    assert project["version"] == zeroshard.compat.VERSION
    assert {"deepspeed", "ds", "ds_report", "ds_bench", "ds_ssh", "zero_to_fp32.py"} <= set(
        project["scripts"]
    )
    for command in project["scripts"].values():
        assert callable(resolve(command))


def test_the_distribution_is_the_stand_in() -> None:
    done = run(
        "import deepspeed, zeroshard.compat.deepspeed as other; assert deepspeed.zero.Init and other is deepspeed",
        path=str(ROOT / "compat" / "deepspeed"),
    )
    assert done.returncode == 0, done.stderr


def test_the_metadata_directory_has_the_version() -> None:
    names = [path.name for path in zeroshard.compat.standin_directory().iterdir()]
    assert f"deepspeed-{zeroshard.compat.VERSION}.dist-info" in names
    assert importlib.import_module("zeroshard.compat").VERSION == zeroshard.compat.VERSION


def test_clones_for_saving_have_memory_of_their_own_and_keep_ties() -> None:
    """What torch.save writes of a view is its whole storage; of two names of a tied weight, two copies."""
    import torch

    clone = resolve("zeroshard.compat.files:clone_tensors_for_torch_save")
    base = torch.arange(100.0)
    state = {"a": base[:4], "tied": base[:4], "other": [base[4:8], 3], "empty": torch.empty(0)}
    found = clone(state)
    assert found["a"] is found["tied"]
    assert found["other"][1] == 3
    assert torch.equal(found["other"][0], base[4:8])
    assert found["a"].untyped_storage().nbytes() == 16
    assert found["a"].data_ptr() != base.data_ptr()


@pytest.mark.parametrize(("path", "told"), [("", True), (STANDIN, False)])
def test_libraries_that_found_no_deepspeed_are_named(path: str, told: bool) -> None:
    code = """
    import sys, types
    sys.modules["transformers.integrations.deepspeed"] = types.ModuleType("transformers.integrations.deepspeed")
    import zeroshard.compat.deepspeed
    """
    done = run(code, path=path)
    assert done.returncode == 0, done.stderr
    assert ("transformers looked for deepspeed when imported, and found none" in done.stderr) == told
