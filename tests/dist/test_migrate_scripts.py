"""The scripts of docs/migrate.md: each runs as it stands there, and before and after give the same losses."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from zeroshard.testing import RankPool

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/migrate.md").read_text(encoding="utf-8")


def blocks() -> dict[str, list[tuple[str, str]]]:
    """Heading -> the fenced blocks below it: (language, text)."""
    found: dict[str, list[tuple[str, str]]] = {}
    heading, fence, lines = "", None, []
    for line in PAGE.splitlines(keepends=True):
        if line.startswith("```"):
            if fence is not None:
                found[heading].append((fence, "".join(lines)))
            fence, lines = line[3:].strip() if fence is None else None, []
        elif fence is not None:
            lines.append(line)
        elif line.startswith("#"):
            heading = line.strip()
            assert heading not in found, "each heading is there once"
            found[heading] = []
    return found


BLOCKS = blocks()


def block(heading: str, place: int = 0, language: str = "python") -> str:
    """The fenced block of `language` at `place` below `heading`."""
    return [text for kind, text in BLOCKS[heading] if kind == language][place]


MODEL = block("## What the scripts share")
CONFIG = block("## What the scripts share", language="json")
DEEPSPEED = block("### Without changing a line"), block("### With its own name")
FSDP2 = block("### One FSDP2 script, before and after"), block("### One FSDP2 script, before and after", 1)
DDP = block("### One DDP script, before and after"), block("### One DDP script, before and after", 1)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory with what the scripts share, as the page says, and weights for those that load some."""
    (tmp_path / "my_model.py").write_text(MODEL)
    (tmp_path / "ds_config.json").write_text(CONFIG)
    torch.manual_seed(0)
    with inside(str(tmp_path)):
        exec(block("## What the scripts share", 1), {})
    return tmp_path


@contextlib.contextmanager
def inside(directory: str, *arguments: str) -> Iterator[None]:
    """A script's surroundings: its directory, its arguments, its imports. The group is the pool's own."""
    before = os.getcwd()
    nothing = mock.Mock(return_value=None)
    os.chdir(directory)
    sys.path.insert(0, directory)
    try:
        with (
            mock.patch.object(sys, "argv", ["script.py", *arguments]),
            mock.patch.object(dist, "init_process_group", nothing),
            mock.patch.object(dist, "destroy_process_group", nothing),
        ):
            yield
    finally:
        sys.modules.pop("my_model", None)
        sys.path.remove(directory)
        os.chdir(before)


def run(rank: int, world: int, script: str, directory: str, *arguments: str) -> tuple[list[float], Any]:
    """Run `script`; the losses that it prints, and a full copy of the weights that it has at the end."""
    import zeroshard.compat

    zeroshard.compat.activate()
    space: dict[str, Any] = {"__name__": "__main__"}
    shown = io.StringIO()
    with inside(directory, *arguments), contextlib.redirect_stdout(shown):
        exec(compile(script, "script.py", "exec"), space)
        weights = whole(space)
    if "engine" in space:
        space["engine"].close()
    return [float(loss) for loss in re.findall(r"loss ([\d.]+)", shown.getvalue())], weights


def whole(space: dict[str, Any]) -> dict[str, torch.Tensor]:
    if "engine" in space:
        return {name: space["engine"].full_fp32(p) for name, p in space["model"].named_parameters()}
    model = getattr(space["model"], "module", space["model"])
    full = {name: getattr(p, "full_tensor", lambda p=p: p)() for name, p in model.named_parameters()}
    return {name: value.detach().clone() for name, value in full.items()}


def assert_same(before: list[Any], after: list[Any], tolerance: float = 3e-6) -> None:
    for (old_losses, old), (new_losses, new) in zip(before, after, strict=True):
        assert len(old_losses) == 2
        assert new_losses == pytest.approx(old_losses, abs=tolerance)
        assert new.keys() == old.keys()
        for name, value in old.items():
            assert (new[name] - value).abs().max() <= tolerance, name


def test_deepspeed(ranks2: RankPool, place: Path) -> None:
    before = ranks2.run(run, DEEPSPEED[0], str(place), "--deepspeed_config", "ds_config.json")
    assert (place / "saves/latest").is_file()
    after = ranks2.run(run, DEEPSPEED[1], str(place))
    assert_same(before, after)


def test_fsdp2(ranks2: RankPool, place: Path) -> None:
    before, after = (ranks2.run(run, script, str(place)) for script in FSDP2)
    # One rounding to bf16 that goes the other way, after sums in another order, is as far as it gets.
    assert_same(before, after, tolerance=2e-3)
    loaded = ranks2.run(load_from_fsdp2, str(place))
    for (_, saved), read in zip(before, loaded, strict=True):
        assert all(torch.equal(read[name], value) for name, value in saved.items())


def test_fsdp2_in_fp32(ranks2: RankPool, place: Path) -> None:
    old, new = FSDP2
    old_precision = "MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)"
    new_precision = '    "bf16": {"enabled": True},\n    "communication_data_type": "fp32",\n'
    assert old_precision in old
    assert new_precision in new
    scripts = old.replace(old_precision, "MixedPrecisionPolicy()"), new.replace(new_precision, "")
    assert_same(*(ranks2.run(run, script, str(place)) for script in scripts))


def load_from_fsdp2(rank: int, world: int, directory: str) -> dict[str, torch.Tensor]:
    """The block that loads what FSDP2 saved, in an engine that just began."""
    script = FSDP2[1].partition("\nsampler = ")[0] + "\n" + block("### Checkpoints of FSDP2")
    return dict(run(rank, world, script, directory)[1])


def test_ddp(ranks2: RankPool, place: Path) -> None:
    (old, new), loop = DDP, block("### The loop as it was")
    before = ranks2.run(run, old, str(place))
    assert_same(before, ranks2.run(run, new, str(place)))
    start = new.partition("for epoch")[0]
    assert_same(before, ranks2.run(run, start + loop, str(place)))


def load_from_ddp(rank: int, world: int, directory: str) -> list[bool]:
    """The block that loads what DDP saved: weights and optimizer state are those in the files."""
    import zeroshard

    config = re.search(r"^config = \{.*?^\}\n", DDP[1], flags=re.DOTALL | re.MULTILINE)
    assert config is not None
    script = DDP[1].partition("torch.manual_seed")[0] + config[0] + block("### Checkpoints of DDP")
    space: dict[str, Any] = {"__name__": "__main__"}
    with inside(directory):
        exec(compile(script, "script.py", "exec"), space)
        weights, state = torch.load("model.pt"), torch.load("optimizer.pt")["state"]
    parameters = dict(space["model"].named_parameters())
    same = [torch.equal(space["engine"].full_fp32(p), weights[name]) for name, p in parameters.items()]
    for place, parameter in enumerate(parameters.values()):
        for key in ("exp_avg", "exp_avg_sq", "step"):
            read = zeroshard.safe_get_full_optimizer_state(parameter, key)
            same.append(torch.equal(read, state[place][key]))
    space["engine"].close()
    return same


def test_checkpoint_of_ddp(ranks2: RankPool, place: Path) -> None:
    ranks2.run(run, DDP[0], str(place))
    for same in ranks2.run(load_from_ddp, str(place)):
        assert len(same) == 14 * 4
        assert all(same)


def test_on_one_process(place: Path) -> None:
    """As `python after.py`: what needs no group."""
    pool = RankPool(1)
    try:
        losses, _ = pool.run(run, DEEPSPEED[1], str(place))[0]
    finally:
        pool.close()
    assert len(losses) == 2


def test_parity_of_a_model_of_your_own(
    ranks2: RankPool, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The block as a module, so that the workers of the pool can import it; its last line is the call."""
    script = block("## What to check after moving")
    assert script.endswith("    print(assert_parity(WithLoss, batch, config))\n")
    (place / "own_model_check.py").write_text(script)
    monkeypatch.syspath_prepend(place)
    own: Any = importlib.import_module("own_model_check")
    found = own.assert_parity(own.WithLoss, own.batch, own.config, pool=ranks2)
    assert found.steps == 5
    for name in ("own_model_check", "my_model"):
        monkeypatch.delitem(sys.modules, name)
