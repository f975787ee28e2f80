"""Of all tests."""

from __future__ import annotations

from hypothesis import settings

# An example has no time limit of its own: it would judge the machine.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
