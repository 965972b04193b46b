"""The errors a person sees, each with the exit code of the `gradeloom` command."""

from __future__ import annotations

from pathlib import Path


def first_line(error: BaseException) -> str:
    """The first line of what a library said, or what it raised where it said nothing."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


class GradeloomError(Exception):
    """Base of every error that is reported as one line instead of a traceback."""

    exit_code = 1


class InputError(GradeloomError):
    """What the user gave is wrong: a file, a row, a field, a setting, a full disk.

    Args:
        message: what is wrong and what was expected.
        file: the file it was found in, if any.
        row: the 1-based row (line) of that file, if any.
        field: the field or setting, if any.
    """

    exit_code = 2

    def __init__(
        self,
        message: str,
        *,
        file: str | Path | None = None,
        row: int | None = None,
        field: str | None = None,
    ) -> None:
        place = [str(file)] if file is not None else []
        if row is not None:
            place.append(f"row {row}")
        if field is not None:
            place.append(f"field '{field}'")
        super().__init__(", ".join(place) + ": " + message if place else message)


class RunIncomplete(GradeloomError):
    """The run ended without a release: too many failures, target out of reach, nothing kept.

    Finished shards stay; the same command goes on from them.
    """

    exit_code = 3


class EngineUnavailable(RunIncomplete):
    """The engine stopped answering and restarts did not help. Nothing recorded is lost."""
