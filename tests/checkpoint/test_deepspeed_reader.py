"""Checkpoints that DeepSpeed 0.19.8 wrote (`make_deepspeed_fixtures.py`), read without it."""

from __future__ import annotations

import math
import os
import pickle
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import Tensor

from zeroshard.checkpoint.deepspeed import DeepSpeedReader, is_deepspeed
from zeroshard.checkpoint.deepspeed.order import Group, assign
from zeroshard.checkpoint.deepspeed.partitions import runs_of_stage_3, runs_of_stages_1_and_2
from zeroshard.checkpoint.views import FlatPiece, PieceLoadPlanner
from zeroshard.errors import CheckpointError

DATA = Path(__file__).parent / "data" / "deepspeed"
CASES = sorted(path.name for path in DATA.iterdir())
CONVERTED = {"universal2": "stage2_fp16", "universal3": "stage3_bf16"}

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def truth_of(case: str) -> dict[str, Tensor]:
    return load_file(DATA / CONVERTED.get(case, case) / "truth.safetensors")


def load(state: dict[str, Any], reader: DeepSpeedReader) -> dict[str, Any]:
    reader.read_metadata()  # DCP would wrap what this raises
    dcp.load(state, storage_reader=reader, planner=PieceLoadPlanner(), no_dist=True)
    return state


def everything(reader: DeepSpeedReader) -> dict[str, Tensor]:
    found = reader.read_metadata().state_dict_metadata
    return load({k: torch.full(m.size, 77, dtype=m.properties.dtype) for k, m in found.items()}, reader)


@pytest.fixture
def copy_of(tmp_path: Path) -> Callable[[str], Path]:
    def copy(case: str) -> Path:
        return Path(shutil.copytree(DATA / case, tmp_path / case))

    return copy


def tag_of(case: Path) -> Path:
    return next(path for path in case.iterdir() if path.is_dir())


def rewrite(path: Path, change: Callable[[Any], Any], **options: Any) -> None:
    """Change what a file of the fixtures holds; without the objects of DeepSpeed's own classes."""
    from zeroshard.checkpoint.deepspeed.pickles import open_value

    value = open_value(path)
    for states in (value, value.get("optimizer_state_dict", {})) if isinstance(value, dict) else ():
        states.pop("loss_scaler", None)
        states.pop("param_slice_mappings", None)
    fresh = path.with_suffix(".new")
    torch.save(change(value), fresh, **options)
    fresh.replace(path)  # the old one is mapped


def test_there_is_a_checkpoint_of_each_kind() -> None:
    assert len(CASES) == 12
    for stage in "0123":
        assert any(case.startswith(f"stage{stage}") for case in CASES)


@pytest.mark.parametrize("case", CASES)
def test_everything_is_what_deepspeed_had(case: str) -> None:
    truth = truth_of(case)
    reader = DeepSpeedReader(DATA / case)
    found = everything(reader)
    aliases = {key for key in found if key.endswith("head.weight")}
    assert set(found) - aliases == set(truth)
    for key, value in truth.items():
        assert found[key].dtype == value.dtype, key
        torch.testing.assert_close(found[key], value, rtol=0, atol=0, msg=key)
    assert len(aliases) == 4
    for alias in aliases:
        assert torch.equal(found[alias], found[alias.replace("head", "embedding")])


def test_the_boxes_of_a_tensor_have_each_element_once() -> None:
    for case in CASES:
        for key, tensor in DeepSpeedReader(DATA / case).read_metadata().state_dict_metadata.items():
            hits = torch.zeros(tensor.size)
            for chunk in tensor.chunks:
                stops = [offset + size for offset, size in zip(chunk.offsets, chunk.sizes, strict=True)]
                assert all(stop <= size for stop, size in zip(stops, tensor.size, strict=True)), key
                hits[tuple(map(slice, chunk.offsets, stops))] += 1
            assert (hits == 1).all(), key


@pytest.mark.parametrize("case", [case for case in CASES if "16" in case and not case.startswith("stage3")])
def test_the_masters_round_to_the_weights_that_were_trained(case: str) -> None:
    """Which says that names and places belong together, without the way in which the truth was recorded."""
    from zeroshard.checkpoint.deepspeed.pickles import open_states

    module = open_states(tag_of(DATA / case) / "mp_rank_00_model_states.pt")["module"]
    found = everything(DeepSpeedReader(DATA / case))
    for name, weight in module.items():
        assert torch.equal(found[f"model/{name}"].to(weight.dtype), weight), name


@pytest.mark.parametrize("case", CASES)
def test_extras(case: str) -> None:
    extras = DeepSpeedReader(DATA / case).extras()
    ranks = extras["world_size"]
    assert (extras["global_steps"], extras["global_samples"]) == (3, 6 * ranks)
    assert extras["client_state"] == {"epoch": 2, "note": {"seed": 0}}
    assert extras["lr_scheduler"] == {"last_batch_iteration": 2}
    assert extras["version"] == "0.19.8"
    assert extras["config"]["train_micro_batch_size_per_gpu"] == 2
    if not case.startswith("universal"):
        assert extras["zero_stage"] == int(case[len("stage")])
    decay, others = extras["param_groups"]
    assert sorted(decay["params"]) == ["embedding.weight", "up.weight"]
    assert sorted(others["params"]) == ["norm.bias", "norm.weight", "up.bias"]
    if "elastic" not in case:
        assert (decay["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
        assert decay["lr"] > 0
    assert "step" not in decay
    fp16 = extras["config"].get("fp16", {}).get("enabled", False)
    assert bool(extras["loss_scale"]) == fp16
    if fp16:
        assert extras["loss_scale"] == {
            "scale": extras["loss_scale"]["scale"],
            "hysteresis": 3,
            "step": 3,
            "last_overflow": -1,
        }
        assert extras["loss_scale"]["scale"] >= 32.0


@pytest.mark.parametrize("case", ["stage2_fp16", "stage3_bf16", "universal2", "universal3", "stage0_fp16"])
def test_any_flat_slice_is_read_alone(case: str) -> None:
    truth = truth_of(case)
    for parts in (2, 5):
        pieces = {}
        for key, value in truth.items():
            share = -(-value.numel() // parts)
            for index in range(parts if value.dim() else 0):
                start, stop = min(index * share, value.numel()), min((index + 1) * share, value.numel())
                buffer = torch.full((stop - start,), 77, dtype=value.dtype)
                pieces[key, index] = FlatPiece(value.shape, start, buffer)
        for index in range(parts):
            mine = {key: piece for (key, at), piece in pieces.items() if at == index and piece.values.numel()}
            load(mine, DeepSpeedReader(DATA / case))
        for key, value in truth.items():
            if value.dim():
                together = torch.cat([pieces[key, index].values for index in range(parts)])
                assert torch.equal(together, value.flatten()), key


def test_the_directory_may_be_that_of_the_tag_and_a_tag_may_be_named(copy_of: Callable[[str], Path]) -> None:
    case = copy_of("stage1_bf16")
    everywhere = [DeepSpeedReader(case), DeepSpeedReader(case / "step3"), DeepSpeedReader(case, "step3")]
    first, *others = [everything(reader) for reader in everywhere]
    for other in others:
        assert all(torch.equal(other[key], value) for key, value in first.items())
    assert is_deepspeed(case)
    assert is_deepspeed(case / "step3")
    assert is_deepspeed(case, "step3")
    assert not is_deepspeed(case, "step4")
    assert not is_deepspeed(case.parent)
    assert DeepSpeedReader(case).directory == case / "step3"


def test_old_names_of_files_and_files_of_another_precision(copy_of: Callable[[str], Path]) -> None:
    case = copy_of("stage1_bf16")
    tag = case / "step3"
    for path in tag.glob("*optim_states.pt"):
        path.rename(tag / path.name.replace("_optim", "optim"))
    (tag / "zero_pp_rank_0_mp_rank_00_optim_states.pt").write_bytes(b"of a run before")
    truth = truth_of(case.name)
    found = everything(DeepSpeedReader(case))
    assert all(torch.equal(found[key], value) for key, value in truth.items())


def test_files_that_are_no_zips(copy_of: Callable[[str], Path]) -> None:
    case = copy_of("stage2_fp16")
    for path in (case / "step3").glob("*.pt"):
        rewrite(path, lambda value: value, _use_new_zipfile_serialization=False)
    truth = truth_of(case.name)
    found = everything(DeepSpeedReader(case))
    assert all(torch.equal(found[key], value) for key, value in truth.items())


def test_without_the_optimizers_files_the_weights_are_there(copy_of: Callable[[str], Path]) -> None:
    case = copy_of("stage2_bf16")
    for path in (case / "step3").glob("*optim_states.pt"):
        path.unlink()
    reader = DeepSpeedReader(case)
    found = everything(reader)
    assert all(key.startswith("model/") for key in found)
    assert found["model/up.weight"].dtype is torch.bfloat16
    assert reader.extras()["param_groups"] == []


def test_the_model_alone() -> None:
    for case in CASES:
        reader = DeepSpeedReader(DATA / case, with_optimizer=False)
        found = everything(reader)
        assert {key.split("/")[0] for key in found} == {"model"}
        assert found["model/up.weight"].dtype is torch.float32
        assert reader.extras()["param_groups"] == []


def test_steps_that_are_counted_in_the_parameter_group(copy_of: Callable[[str], Path]) -> None:
    case = copy_of("stage2_fp16")

    def move(states: Any) -> Any:
        inner = states["optimizer_state_dict"]["base_optimizer_state"]
        for index, group in enumerate(inner["param_groups"]):
            group["step"] = int(inner["state"][index].pop("step"))
        return states

    for path in (case / "step3").glob("*optim_states.pt"):
        rewrite(path, move)
    found = everything(DeepSpeedReader(case))
    assert found["optimizer/step/up.bias"].item() == 3.0


# Pickles


class Runs:
    """Calls `function` when it is unpickled."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


HOSTILE = {
    "universal2": ["mp_rank_00_model_states.pt", "zero/optimizer_state.pt", "zero/up.bias/exp_avg.pt"],
    "stage0_fp32": ["mp_rank_00_model_states.pt"],
    "stage2_fp16": ["mp_rank_00_model_states.pt", "zero_pp_rank_1_mp_rank_00_optim_states.pt"],
    "stage3_fp16": [
        "zero_pp_rank_1_mp_rank_00_model_states.pt",
        "zero_pp_rank_0_mp_rank_00_optim_states.pt",
    ],
}


@pytest.mark.parametrize(
    ("case", "name"), [(case, name) for case, names in HOSTILE.items() for name in names]
)
def test_a_hostile_pickle_is_refused_and_nothing_runs(
    case: str, name: str, copy_of: Callable[[str], Path], tmp_path: Path
) -> None:
    marker = tmp_path / "ran"
    directory = copy_of(case)
    path = tag_of(directory) / name
    before = path.read_bytes()
    for attack, shown in [
        (Runs(os.system, f"touch {marker}"), "system"),
        (Runs(eval, f"open({str(marker)!r}, 'w')"), "eval"),
        (Runs(pickle.loads, pickle.dumps(Runs(os.mkdir, str(marker)))), "pickle.loads"),
        (Runs(Path(marker).touch), "getattr"),
    ]:
        path.write_bytes(before)
        rewrite(path, lambda value, attack=attack: {**value, "x": attack})
        with pytest.raises(CheckpointError, match=f"{name}.*{shown}.* can run any code"):
            everything(DeepSpeedReader(directory))
        rewrite_bare(path, attack)
        with pytest.raises(CheckpointError, match=f"{path.name}"):
            everything(DeepSpeedReader(directory))
        assert not marker.exists()


def rewrite_bare(path: Path, value: Any) -> None:
    """A file that is one pickle and no archive, with nothing but `value`."""
    path.write_bytes(pickle.dumps(value, protocol=2))


class Mine:
    pass


def test_a_class_of_the_users_is_refused_until_they_allow_it(copy_of: Callable[[str], Path]) -> None:
    directory = copy_of("stage0_fp32")
    path = directory / "step3" / "mp_rank_00_model_states.pt"
    mine = Mine()
    mine.value = 3
    rewrite(path, lambda states: {**states, "mine": mine})
    with pytest.raises(CheckpointError, match=r"test_deepspeed_reader\.Mine.*add_safe_globals"):
        DeepSpeedReader(directory).extras()
    with torch.serialization.safe_globals([Mine]):
        assert DeepSpeedReader(directory).extras()["client_state"]["mine"].value == 3


# What can be wrong


def refused(directory: Path, *parts: str, tag: str | None = None) -> None:
    """Reading it says all `parts`, and leaves what was to be filled alone."""
    target = torch.full((7, 5), 77.0)
    with pytest.raises(CheckpointError) as caught:
        load({"model/up.weight": target}, DeepSpeedReader(directory, tag))
    for part in parts:
        assert part in str(caught.value)
    assert (target == 77).all()


def test_directories_that_are_not_there(copy_of: Callable[[str], Path], tmp_path: Path) -> None:
    case = copy_of("stage2_bf16")
    refused(tmp_path / "nowhere", str(tmp_path / "nowhere"), "is no directory")
    refused(case, "step4", "Tags here: step3", tag="step4")
    (case / "latest").write_text("step9")
    refused(case, "latest", "'step9'", "Tags here: step3")
    (case / "latest").unlink()
    refused(case, "no `latest`", "Tags here: step3")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", "no `latest`", "save_checkpoint")


@pytest.mark.parametrize(
    ("case", "name"),
    [
        ("stage2_fp16", "zero_pp_rank_0_mp_rank_00_optim_states.pt"),
        ("stage2_fp16", "zero_pp_rank_2_mp_rank_00_optim_states.pt"),
        ("stage1_bf16", "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"),
        ("stage2_fp16", "mp_rank_00_model_states.pt"),
        ("stage3_bf16", "zero_pp_rank_1_mp_rank_00_model_states.pt"),
        ("stage3_bf16", "bf16_zero_pp_rank_2_mp_rank_00_optim_states.pt"),
        ("universal3", "zero_pp_rank_1_mp_rank_00_model_states.pt"),
        ("universal2", "zero/optimizer_state.pt"),
        ("universal3", "zero/up.weight/fp32.pt"),
    ],
)
def test_a_missing_file_is_named(case: str, name: str, copy_of: Callable[[str], Path]) -> None:
    directory = copy_of(case)
    (tag_of(directory) / name).unlink()
    refused(directory, name, "opy")


def test_stage_3_without_its_optimizer_has_no_weights(copy_of: Callable[[str], Path]) -> None:
    directory = copy_of("stage3_fp16")
    for path in (directory / "step3").glob("*optim_states.pt"):
        path.unlink()
    refused(directory, "zero_pp_rank_0_mp_rank_00_optim_states.pt is missing", "stage 3 has the weights")


def test_a_file_of_another_run_is_named(copy_of: Callable[[str], Path]) -> None:
    directory = copy_of("stage2_fp16")
    tag = directory / "step3"
    extra = tag / "zero_pp_rank_3_mp_rank_00_optim_states.pt"
    shutil.copy(tag / "zero_pp_rank_0_mp_rank_00_optim_states.pt", extra)
    refused(directory, f"{extra} is left from another run", "3 ranks saved")


@pytest.mark.parametrize("case", ["stage2_fp16", "stage3_bf16"])
def test_elements_that_no_parameter_takes(case: str, copy_of: Callable[[str], Path]) -> None:
    directory = copy_of(case)

    def forget(states: Any) -> Any:
        shapes = [
            {n: s for n, s in members.items() if n != "up.weight"} for members in states["param_shapes"]
        ]
        return {**states, "param_shapes": shapes}

    for path in (directory / "step3").glob("*model_states.pt"):
        rewrite(path, forget)
    refused(directory, "optim_states.pt", "elements")


@pytest.mark.parametrize(("case", "name"), [(case, names[-1]) for case, names in HOSTILE.items()])
def test_a_file_that_is_cut_off_or_no_pickle(case: str, name: str, copy_of: Callable[[str], Path]) -> None:
    directory = copy_of(case)
    path = tag_of(directory) / name
    content = path.read_bytes()
    for damaged in [*(content[: len(content) * part // 7] for part in range(7)), b"hello" * 100]:
        path.write_bytes(damaged)
        refused(directory, name, f"({len(damaged)} bytes) is cut off or damaged", "opy it from")


def test_layouts_that_are_not_read(copy_of: Callable[[str], Path]) -> None:
    directory = copy_of("stage2_fp16")
    tag = directory / "step3"
    for name in [
        "mp_rank_01_model_states.pt",
        "zero_pp_rank_0_mp_rank_01_optim_states.pt",
        "layer_00-model_00-model_states.pt",
        "layer_0_expert_1_mp_rank_00_model_states.pt",
        "expp_rank_0_mp_rank_00_optim_states.pt",
    ]:
        (tag / name).write_bytes(b"")
        refused(directory, name, "ds_to_universal")
        (tag / name).unlink()
    rewrite(tag / "mp_rank_00_model_states.pt", lambda states: {"module": states["module"]})
    refused(directory, str(tag), "not laid out as DeepSpeed")
    torch.save([1, 2], tag / "mp_rank_00_model_states.pt")
    refused(directory, "mp_rank_00_model_states.pt holds a list")


def test_experts_and_states_on_nvme(copy_of: Callable[[str], Path]) -> None:
    directory = copy_of("stage2_fp16")
    first = directory / "step3" / "zero_pp_rank_0_mp_rank_00_optim_states.pt"

    def experts(states: Any) -> Any:
        states["optimizer_state_dict"]["partition_count"] = [3, 1]
        return states

    rewrite(first, experts)
    refused(directory, first.name, "[3, 1] ranks", "experts")

    directory = copy_of("stage3_fp16")

    def elsewhere(states: Any) -> Any:
        states["optimizer_state_dict"]["fp32_flat_groups"] = [torch.empty(0)] * 2
        return states

    for path in (directory / "step3").glob("*optim_states.pt"):
        rewrite(path, elsewhere)
    refused(directory, "0 elements", "NVMe")


def test_parameters_that_the_conversion_mixed_up(copy_of: Callable[[str], Path]) -> None:
    """As ds_to_universal does with round-robin order (checked with 0.19.8)."""
    directory = copy_of("universal2")
    zero = directory / "step3_universal" / "zero"
    (zero / "norm.weight").rename(zero / "swap")
    (zero / "norm.bias").rename(zero / "norm.weight")
    (zero / "swap").rename(zero / "norm.bias")

    def round_robin(states: Any) -> Any:
        states["ds_config"]["zero_optimization"]["round_robin_gradients"] = True
        return states

    rewrite(zero.parent / "mp_rank_00_model_states.pt", round_robin)
    refused(directory, "fp32.pt is not the weight", "round_robin_gradients", "instead")


# Stage 0: names


def test_names_go_where_only_they_fit() -> None:
    shapes = {"a": 6, "b": 3, "c": 5, "d": 3}

    def group(*sizes: int) -> Group:
        return Group(len(sizes), lambda at, name: shapes[name] == sizes[at])

    def one(_: str) -> int:
        return 1

    assert assign(list(shapes), [group(6, 5), group(3, 3)], one) == [["a", "c"], ["b", "d"]]
    assert assign(list(shapes), [group(5), group(6)], one) == [["c"], ["a"]]
    assert assign(list(shapes), [group(6, 3, 5, 3)], one) == [["a", "b", "c", "d"]]
    assert assign(list(shapes), [group(3), group(3)], one) is None
    assert assign(list(shapes), [group(3)], one) is None
    with pytest.raises(LookupError):
        assign(list(shapes), [group(5, 6)], one)
    with pytest.raises(LookupError):
        assign(list(shapes), [group(6, 6)], one)


def test_an_order_that_cannot_be_told(copy_of: Callable[[str], Path]) -> None:
    """One group for each of two norms: either may be either."""
    directory = copy_of("stage0_fp32")
    path = directory / "step3" / "mp_rank_00_model_states.pt"
    truth = truth_of(directory.name)

    def split(states: Any) -> Any:
        options = states["optimizer"]["param_groups"][1]
        places = options["params"]
        states["optimizer"]["param_groups"][1:] = [{**options, "params": [place]} for place in places]
        return states

    rewrite(path, split)
    with pytest.raises(
        CheckpointError, match=r"mp_rank_00_model_states\.pt.*more than one order.*optimizer_order"
    ):
        everything(DeepSpeedReader(directory))
    assert "model/norm.bias" in everything(DeepSpeedReader(directory, with_optimizer=False))
    order = [["embedding.weight", "up.weight"], ["norm.weight"], ["norm.bias"], ["up.bias"]]
    found = everything(DeepSpeedReader(directory, optimizer_order=order))
    assert all(torch.equal(found[key], value) for key, value in truth.items())
    for wrong, message in [
        ([*order[:3], ["nobody"]], "'nobody'"),
        (order[:3], r"groups of \[2, 1, 1\] names"),
        ([order[0], order[1], order[2] + order[3], []], r"groups of \[2, 1, 2, 0\]"),
    ]:
        with pytest.raises(CheckpointError, match=message):
            DeepSpeedReader(directory, optimizer_order=wrong).read_metadata()


# Partitions


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_partitions_of_any_shapes_are_put_together(world: int) -> None:
    """Against the layout written as plain concatenation, with parameters of no, few and many elements."""
    draw = random.Random(world)
    for _ in range(60):
        shapes = [
            {
                f"p{group}.{index}": tuple(draw.randint(1, 4) for _ in range(draw.randint(1, 3)))
                for index in range(draw.randint(1, 4))
            }
            for group in range(draw.randint(1, 3))
        ]
        paths = [Path(f"rank{rank}") for rank in range(world)]
        tensors = {n: torch.randn(shape) for members in shapes for n, shape in members.items()}
        padding = [[draw.choice([0, 0, 3]) for _ in members] for members in shapes]
        for spaces in padding:
            spaces[-1] = 0
        flat: list[list[Tensor]] = [[] for _ in range(world)]
        by_slices: list[list[Tensor]] = [[] for _ in range(world)]
        for members, spaces in zip(shapes, padding, strict=True):
            parts = [
                torch.cat([tensors[name].flatten(), torch.full((space,), 9.0)])
                for name, space in zip(members, spaces, strict=True)
            ]
            line = torch.cat(parts)
            size = math.ceil(line.numel() / (2 * world)) * 2
            padded = torch.cat([line, torch.full((size * world - len(line),), 9.0)])
            for rank, part in enumerate(padded.split(size)):
                flat[rank].append(part[: max(0, line.numel() - rank * size)])
            for rank in range(world):
                slices = []
                for name in members:
                    share = math.ceil(tensors[name].numel() / world)
                    whole = torch.cat([tensors[name].flatten(), torch.full((share * world,), 9.0)])
                    slices.append(whole[rank * share : (rank + 1) * share])
                by_slices[rank].append(torch.cat(slices))
        for runs, stored in [
            (runs_of_stages_1_and_2(shapes, sizes_of(flat), padding, paths), flat),
            (runs_of_stage_3(shapes, sizes_of(by_slices), paths), by_slices),
        ]:
            for name, tensor in tensors.items():
                whole = torch.full((tensor.numel(),), 77.0)
                for run in runs[name]:
                    part = stored[run.rank][run.group][run.begin : run.begin + run.count]
                    assert (whole[run.start : run.start + run.count] == 77).all()
                    whole[run.start : run.start + run.count] = part
                assert torch.equal(whole, tensor.flatten())


def sizes_of(partitions: list[list[Tensor]]) -> list[list[int]]:
    return [[part.numel() for part in rank] for rank in partitions]


def test_partitions_that_are_too_short(copy_of: Callable[[str], Path]) -> None:
    shapes, paths = [{"a": (5,), "b": (2, 5)}], [Path("rank0"), Path("rank1")]
    with pytest.raises(
        CheckpointError, match=r"group 0 of the optimizer has 14 elements in rank0 and on.* take 15"
    ):
        runs_of_stages_1_and_2(shapes, [[8], [6]], None, paths)
    assert runs_of_stages_1_and_2(shapes, [[8], [8]], None, paths)["b"][1].count == 7
    for case, key, what in [
        ("stage2_fp16", "zero_pp_rank_2_mp_rank_00_optim_states.pt", "exp_avg"),
        ("stage3_bf16", "zero_pp_rank_1_mp_rank_00_model_states.pt", "frozen.weight"),
    ]:
        directory = copy_of(case)

        def shorten(states: Any, what: str = what) -> Any:
            if what == "exp_avg":
                inner = states["optimizer_state_dict"]["base_optimizer_state"]["state"]
                inner[0][what] = inner[0][what][:3]
            else:
                states["frozen_param_fragments"][what] = torch.zeros(3)
            return states

        rewrite(directory / "step3" / key, shorten)
        refused(directory, str(directory / "step3"), "a tensor of 3 elements where")
