"""The error tree: grouped by what a handler does, each class also the builtin that Python users catch.

Every error carries its problems as data: where, expected, got, remedy. `exit_code` is what the command line ends with.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Self


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is not as it should be.

    Attributes
    ----------
    where
        Path inside the dataset, file of a source, or name of an argument.
    expected, got
        What should be there and what is.
    remedy
        What the user can do, or "".
    samples
        Ids of the samples concerned, where they are known.
    """

    where: str
    expected: str
    got: str
    remedy: str = ""
    samples: tuple[str, ...] = ()

    def __str__(self) -> str:
        text = f"{self.where}: expected {self.expected}, got {self.got}"
        if self.samples:
            shown = ", ".join(self.samples[:5]) + (" …" if len(self.samples) > 5 else "")
            text += f" [{len(self.samples)} sample(s): {shown}]"
        return f"{text} — {self.remedy}" if self.remedy else text


class HsfmtError(Exception):
    """Base of all errors of this package.

    Attributes
    ----------
    problems : tuple[Problem, ...]
        All that was found wrong; empty only for an error that came out of another process as text.
    dataset : str
        URL or path of the dataset that it is about, without secrets, or "". The text begins with it; `where` does not.
    exit_code : int
        Exit code of the command line: 1 problems in the data, 2 usage or bad input, 3 not found or storage failure.
    """

    exit_code = 1
    dataset: str = ""

    def __init__(self, problems: Iterable[Problem] | str) -> None:
        # A text is what torch's DataLoader calls the class with, to raise a worker's error again in the parent.
        self.problems = () if isinstance(problems, str) else tuple(problems)
        super().__init__(problems if isinstance(problems, str) else "\n".join(map(str, self.problems)))

    @classmethod
    def at(cls, where: str, *, expected: str, got: str, remedy: str = "", samples: tuple[str, ...] = ()) -> Self:
        """Make the error of a single problem."""
        return cls([Problem(where, expected, got, remedy, samples)])

    def shown(self) -> tuple[Problem, ...]:
        """Return the problems as people are told them: each names the dataset, and none does so twice."""
        return tuple(
            problem if self._is_named_by(problem) else replace(problem, where=f"{self.dataset}: {problem.where}")
            for problem in self.problems
        )

    def _is_named_by(self, problem: Problem) -> bool:
        # Not by the name of one beside it, which begins alike; and a remedy says what to do, not where it is.
        named = re.compile(rf"{re.escape(self.dataset)}(?![\w-])")
        return not self.dataset or any(map(named.search, (problem.where, problem.expected, problem.got)))

    def __str__(self) -> str:
        return "\n".join(map(str, self.shown())) if self.problems else Exception.__str__(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.problems or str(self),), {"dataset": self.dataset}


class CorruptionError(HsfmtError, ValueError):
    """Stored bytes are not those that were committed: a digest, size or structure does not match."""


class FormatError(HsfmtError, ValueError):
    """A document or file does not follow the format (malformed, not merely changed)."""


class FormatVersionError(FormatError):
    """The dataset needs a newer library."""

    exit_code = 2


class HeaderMismatchError(HsfmtError, ValueError):
    """Data of another meaning: other layers, norm, dtype, hidden size or model than the dataset's."""

    exit_code = 2


class SampleError(HsfmtError, ValueError):
    """A sample handed to a writer is refused."""

    exit_code = 2


class NonFiniteError(SampleError):
    """A sample holds NaN or Inf and the policy is to raise."""

    exit_code = 1


class DuplicateSampleError(SampleError):
    """The id is in the dataset, or in this writer's open part, already."""


class UsageError(HsfmtError, ValueError):
    """A request that can't be met as it stands: contradictory, ambiguous or missing arguments."""

    exit_code = 2


class SourceError(HsfmtError, ValueError):
    """A file of a foreign format can't be taken as it is."""


class NotFoundError(HsfmtError, FileNotFoundError):
    """No dataset, snapshot, part or object of that name."""

    exit_code = 3


class SampleNotFoundError(HsfmtError, KeyError):
    """No sample of that id in the snapshot."""

    exit_code = 3


class StorageError(HsfmtError, OSError):
    """The storage failed: I/O error, no space, no permission, network."""

    exit_code = 3


class AccessError(StorageError):
    """Nobody is let in, or there is no server: no credentials or permission, no bucket, nothing that answers.

    It says nothing about what is stored.
    """


class ObjectChangedError(StorageError):
    """An object that is never changed once it is committed became another one while it was read."""


class ExpectationError(HsfmtError, ValueError):
    """A sealed set is not the one that `--expect` asked for."""


class WriterClosedError(HsfmtError, RuntimeError):
    """The writer was closed, or failed before; nothing more is taken."""

    exit_code = 2
