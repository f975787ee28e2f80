from typing import Any


def build_schedule(type: Any, params: Any, optimizer: Any) -> Any: ...
