from typing import Any


class Monitor:
    enabled = False

    @staticmethod
    def of(config: Any, rank: int) -> "Monitor":
        return Monitor()

    def write_events(self, events: Any) -> None: ...
    def close(self) -> None: ...
