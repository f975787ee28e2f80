from __future__ import annotations

import shutil
import subprocess
import sys
import weakref
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from zeroshard.config import parse, require_supported
from zeroshard.errors import ConfigError
from zeroshard.monitor import Backend, Monitor

DEVICE_FULL = Path("/dev/full")

# TensorBoard's writer thread ends by the error that it passes on.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")


def make(directory: Path, *sections: str, rank: int = 0) -> Monitor:
    chosen = {"enabled": True, "output_path": str(directory), "job_name": "job"}
    config = parse(dict.fromkeys(sections, chosen))
    require_supported(config)
    return Monitor.of(config, rank)


def test_tensorboard_has_what_was_written(tmp_path: Path) -> None:
    monitor = make(tmp_path, "tensorboard")
    monitor.write_events([("Train/Samples/lr", 0.25, 8), ("Train/Samples/loss", torch.tensor(1.5), 8)])
    monitor.write_events([("Train/Samples/lr", 1, 16)])
    monitor.flush()
    seen = EventAccumulator(str(tmp_path / "job")).Reload()
    assert [(event.step, event.value) for event in seen.Scalars("Train/Samples/lr")] == [(8, 0.25), (16, 1.0)]
    assert [(event.step, event.value) for event in seen.Scalars("Train/Samples/loss")] == [(8, 1.5)]
    monitor.close()


def test_csv_continues_below_what_is_there(tmp_path: Path) -> None:
    for run in range(2):
        monitor = make(tmp_path, "csv_monitor")
        half = torch.tensor(0.5, dtype=torch.bfloat16)
        monitor.write_events([("Train/Samples/my lr", half, run), ("plain", 1e-10, run)])
        monitor.close()
    files = {path.name: path.read_text() for path in (tmp_path / "job").iterdir()}
    assert files == {
        "Train_Samples_my_lr.csv": "step,my lr\n0,0.5\n1,0.5\n",
        "plain.csv": "step,plain\n0,1e-10\n1,1e-10\n",
    }


def test_the_default_directory_is_below_the_current_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monitor = Monitor.of(parse({"csv_monitor": {"enabled": True}}), 0)
    monitor.write_events([("a", 1.0, 0)])
    monitor.close()
    assert (tmp_path / "DeepSpeedJobName" / "a.csv").exists()


def test_other_ranks_and_closed_monitors_write_nothing(tmp_path: Path) -> None:
    other = make(tmp_path, "csv_monitor", "tensorboard", rank=1)
    assert not other.enabled
    other.write_events([("a", 1.0, 0)])
    other.close()
    assert not any(tmp_path.iterdir())
    own = make(tmp_path, "csv_monitor")
    assert own.enabled
    own.close()
    own.close()
    assert not own.enabled
    own.write_events([("a", 1.0, 0)])
    assert not any((tmp_path / "job").iterdir())


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "zeroshard"]


@pytest.mark.parametrize("section", ["csv_monitor", "tensorboard"])
def test_a_directory_that_went_away_is_one_warning(
    section: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monitor = make(tmp_path, section)
    monitor.write_events([("a", 1.0, 0)])
    monitor.flush()
    shutil.rmtree(tmp_path / "job")
    for step in range(1, 4):
        monitor.write_events([("a", 1.0, step), ("b", 1.0, step)])
        monitor.flush()
    assert not monitor.enabled
    (told,) = warnings(caplog)
    assert f"no more events are written to {tmp_path / 'job'}: " in told
    assert "No such file or directory" in told
    monitor.close()


@pytest.mark.skipif(not DEVICE_FULL.exists(), reason="no /dev/full here")
def test_a_full_disk_ends_that_backend_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    monitor = make(tmp_path, "csv_monitor", "tensorboard")
    (tmp_path / "job" / "a.csv").symlink_to(DEVICE_FULL)
    monitor.write_events([("a", 1.0, 0)])
    monitor.write_events([("a", 2.0, 1)])
    assert monitor.enabled
    monitor.close()
    (told,) = warnings(caplog)
    assert "No space left on device" in told
    seen = EventAccumulator(str(tmp_path / "job")).Reload()
    assert [event.value for event in seen.Scalars("a")] == [1.0, 2.0]


def test_what_fails_at_the_end_is_a_warning_too(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Backend):
        target = "nowhere"

        def close(self) -> None:
            raise ValueError("not closed")

    monitor = Monitor([Broken()])
    monitor.close()
    assert warnings(caplog) == [
        "no more events are written to nowhere: ValueError: not closed. The training goes on without them."
    ]


def test_a_closed_monitor_is_let_go(tmp_path: Path) -> None:
    monitor = make(tmp_path, "csv_monitor")
    monitor.close()
    alive = weakref.ref(monitor)
    del monitor
    assert alive() is None


def test_a_value_that_is_no_number_is_an_error(tmp_path: Path) -> None:
    monitor = make(tmp_path, "csv_monitor")
    with pytest.raises(ValueError, match="only one element"):
        monitor.write_events([("a", torch.ones(2), 0)])
    assert monitor.enabled
    monitor.close()


@pytest.mark.parametrize("section", ["csv_monitor", "tensorboard"])
def test_a_directory_that_cannot_be_made(section: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=rf"dict: {section}\.output_path and job_name: cannot write in "):
        make(tmp_path / "file", section)


def test_a_missing_tensorboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ConfigError, match=r"pip install 'zeroshard\[monitor\]'"):
        make(tmp_path, "tensorboard")


class FakeRun:
    def __init__(self, **named: Any) -> None:
        self.calls: list[Any] = [named]

    def log(self, values: dict[str, float], step: int) -> None:
        self.calls.append((values, step))

    def finish(self) -> None:
        self.calls.append("finish")


def test_wandb(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[FakeRun] = []
    fake = ModuleType("wandb")
    fake.init = lambda **named: runs.append(FakeRun(**named)) or runs[-1]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", fake)
    config = parse({"wandb": {"enabled": True, "group": "g", "team": "t", "project": "p"}})
    require_supported(config)
    monitor = Monitor.of(config, 0)
    monitor.write_events([("a", torch.tensor(2), 3), ("b", 0.5, 3)])
    monitor.flush()
    monitor.close()
    (run,) = runs
    assert run.calls == [
        {"group": "g", "entity": "t", "project": "p"},
        ({"a": 2.0}, 3),
        ({"b": 0.5}, 3),
        "finish",
    ]


@pytest.mark.parametrize("found", [None, ModuleType("wandb")], ids=["missing", "the folder of a run"])
def test_a_missing_wandb(found: ModuleType | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", found)
    with pytest.raises(ConfigError, match="pip install wandb"):
        Monitor.of(parse({"wandb": {"enabled": True}}), 0)


def script(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_backends_that_are_off_are_not_imported() -> None:
    done = script(
        "import sys; from zeroshard.config import parse; from zeroshard.monitor import Monitor;"
        "assert not Monitor.of(parse({}), 0).enabled;"
        "print({'tensorboard', 'wandb'} & set(sys.modules))"
    )
    assert done.stdout.strip() == "set()", done.stderr


def test_a_script_that_ends_by_an_error_is_flushed_and_not_closed() -> None:
    """Closing would tell wandb that all went well."""
    code = """
from zeroshard.monitor import Backend, Monitor
class Spy(Backend):
    target = "spy"
    def write(self, name, value, step): print("write", name, value, step)
    def flush(self): print("flush")
    def close(self): print("close")
Monitor([Spy()]).close()
monitor = Monitor([Spy()])
monitor.write_events([("loss", 2, 1)])
raise SystemExit("the loss is nan")
"""
    done = script(code)
    assert done.stderr.strip() == "the loss is nan"
    assert done.stdout.splitlines() == ["close", "write loss 2.0 1", "flush"]
