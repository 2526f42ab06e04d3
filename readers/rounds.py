"""Who takes which batch: a global sequence of batches, dealt to ranks in rounds, so that all take as many steps."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rounds:
    """The rest of an epoch, from a global batch on, in rounds of one batch a rank.

    Attributes
    ----------
    n_batches
        Of the whole epoch.
    start
        Batches that were consumed before.
    world_size
        Number of ranks.
    drop_last
        Whether the last round is left out if it isn't full; else it is filled with batches from the epoch's beginning.
    """

    n_batches: int
    start: int
    world_size: int
    drop_last: bool

    @property
    def n_steps(self) -> int:
        """Batches that each rank takes."""
        rest = max(self.n_batches - self.start, 0)
        return rest // self.world_size if self.drop_last else -(-rest // self.world_size)

    def batch(self, rank: int, step: int) -> int:
        """Return the number of the batch that a rank takes at a step."""
        return (self.start + step * self.world_size + rank) % self.n_batches

    @property
    def padding(self) -> tuple[int, ...]:
        """Numbers of the batches that the last round takes once more, in the order of ranks."""
        end = self.start + self.n_steps * self.world_size
        return tuple(number % self.n_batches for number in range(self.n_batches, end))

    @property
    def dropped(self) -> range:
        """Numbers of the batches that no rank takes."""
        return range(min(self.start + self.n_steps * self.world_size, self.n_batches), self.n_batches)
