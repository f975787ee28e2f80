"""For tests, ours and yours: rank processes that are reused, and parity with plain PyTorch."""

from zeroshard.testing.parity import BF16_TOLERANCE, FP32_TOLERANCE, Difference, assert_parity, measure_parity
from zeroshard.testing.ranks import RankPool, RunFailedError

__all__ = [
    "BF16_TOLERANCE",
    "FP32_TOLERANCE",
    "Difference",
    "RankPool",
    "RunFailedError",
    "assert_parity",
    "measure_parity",
]
