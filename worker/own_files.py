"""A model folder's files are its own: whatever it names lies inside it, also after links are followed.

Must not know what the files hold.
"""

from __future__ import annotations

from pathlib import Path

from producer.errors import UsageError

REBUILD = "Build the folder again with `worker build`, or copy it again."


def file_within(folder: Path, name: str, what: str) -> Path:
    """``folder / name``, made sure to be a file that lies inside ``folder``."""
    path = folder / name
    try:
        inside, there = path.resolve().is_relative_to(folder.resolve()), path.is_file()
    except (OSError, ValueError) as error:  # no name that a file can have
        raise UsageError(f"{folder}: {what} {name!r} is no file name ({error}).") from error
    if not inside:
        raise UsageError(
            f"{what} '{name}' lies outside {folder}: a model folder may name only its own files."
        )
    if not there:
        raise UsageError(f"{path} is missing ({what}). {REBUILD}")
    return path
