"""The base of every section of the config tree.

The modules that define sections have no postponed annotations: evaluating them costs a third of the import.
"""

from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator

__all__ = ["Section", "literals"]


class Section(BaseModel):
    """A frozen object of the config. Keys that it does not have are an error; enum values ignore case."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        arbitrary_types_allowed=True,
        protected_namespaces=(),
        # Validators are built at the first parse, which keeps the import short.
        defer_build=True,
    )

    @field_validator("*", mode="before")
    @classmethod
    def _ignore_case(cls, value: Any, info: ValidationInfo) -> Any:
        if not isinstance(value, str) or info.field_name is None:
            return value
        spellings = {word.lower(): word for word in literals(cls.model_fields[info.field_name].annotation)}
        return spellings.get(value.lower(), value)


def literals(annotation: Any) -> Iterator[str]:
    """The words that an annotation such as `Literal["mean", "sum"] | None` allows."""
    if get_origin(annotation) is Literal:
        yield from get_args(annotation)
    else:
        for part in get_args(annotation):
            yield from literals(part)
