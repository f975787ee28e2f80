"""What all property tests share.

They draw the same examples in every run; with ZEROSHARD_EXAMPLES=1000 other ones, and so many in
tests/dist/test_properties.py. They have no time limits: on a loaded machine those fail without a reason.
"""

import os

from hypothesis import HealthCheck, settings

settings.register_profile(
    "zeroshard",
    deadline=None,
    derandomize="ZEROSHARD_EXAMPLES" not in os.environ,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("zeroshard")
