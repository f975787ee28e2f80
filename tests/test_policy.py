from __future__ import annotations

import pytest

from zeroshard.errors import ConfigError
from zeroshard.policy import Policy


@pytest.mark.parametrize(
    ("stage", "mics", "hpz", "sizes", "words"),
    [
        (0, -1, 1, (1, 8, 1), ""),
        (2, 0, 0, (8, 1, 1), ""),
        (3, 4, 1, (4, 2, 1), "2 replicas of shard groups of 4 (MiCS)"),
        (3, 1, 1, (1, 8, 1), ""),  # nothing is sharded
        (3, 8, 1, (8, 1, 1), ""),  # nothing is replicated
        (3, -1, 2, (8, 1, 2), "second shards in groups of 2 (hpZ)"),
        (3, -1, 8, (8, 1, 1), ""),  # the second shards would be the first
        (3, -1, 64, (8, 1, 1), ""),
        (3, 2, 4, (2, 4, 1), "4 replicas of shard groups of 2 (MiCS)"),
        (3, 4, 2, (4, 2, 2), "2 replicas of shard groups of 4 (MiCS), second shards in groups of 2 (hpZ)"),
    ],
)
def test_the_groups_of_eight_ranks(
    stage: int, mics: int, hpz: int, sizes: tuple[int, int, int], words: str
) -> None:
    policy = Policy.of_stage(stage, 8, mics=mics, hpz=hpz)
    assert (policy.shard_size, policy.replicate_size, policy.secondary_size) == sizes
    assert policy.world == 8
    assert policy.axes == words


@pytest.mark.parametrize(
    ("mics", "hpz", "message"),
    [
        (
            3,
            1,
            "mics_shard_size = 3: the 8 ranks of the run cannot be cut into groups of 3; choose one of 1, 2, 4, 8",
        ),
        (16, 1, "mics_shard_size = 16"),
        (-1, 3, "zero_hpz_partition_size = 3: the 8 ranks of the run"),
        (4, 3, "zero_hpz_partition_size = 3: the 4 ranks of a shard group cannot be cut into groups of 3"),
    ],
)
def test_ranks_that_cannot_be_cut(mics: int, hpz: int, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        Policy.of_stage(3, 8, mics=mics, hpz=hpz)
    assert message in str(error.value)
