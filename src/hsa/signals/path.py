"""`Path`: the location of something inside the user's object, for error messages."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, eq=False)
class Path:
    """A step below another path, turned into text only for an error message.

    Readers make a path per member. Strings would take time and memory quadratic in the depth; links do not.

    >>> str(Path(Path(Path(None, "page"), "[2]"), ".image"))
    'page[2].image'
    """

    above: Path | None
    step: str

    def __str__(self) -> str:
        steps: list[str] = []
        path: Path | None = self
        while path is not None:
            steps.append(path.step)
            path = path.above
        return "".join(reversed(steps))
