"""`Rows`: the requests that lie in the rows of a batch, with those in use at the front."""

from .job import Job
from .lanes import Lanes


class Rows:
    """Requests in the rows of `lanes`.

    Rounds run over the first rows of a cache, so rows in use are kept at the front. With widths of 1, 4 and 16 rows and
    requests in rows 0 and 5, the one in row 5 moves to row 1, and rounds run over 4 rows instead of 16.
    """

    def __init__(self, lanes: Lanes):
        self.lanes = lanes
        self.jobs: list[Job | None] = [None] * lanes.rows

    @property
    def active(self) -> list[Job]:
        return [job for job in self.jobs if job is not None]

    @property
    def has_room(self) -> bool:
        return None in self.jobs

    def free_row(self) -> int:
        """The first row that nobody uses, if possible one that no other stream reads, either."""
        free = [row for row, job in enumerate(self.jobs) if job is None]
        return next((row for row in free if not self.lanes.is_read(row)), free[0])

    def compact(self) -> None:
        """Move the last rows to free ones that no other stream reads, if fewer rows will do then."""
        width = self.lanes.width(max(len(self.active), 1))
        for job in self.active[::-1]:
            row, to = job.row, self.free_row() if self.has_room else len(self.jobs)
            if row < width or to >= width or self.lanes.is_read(to):
                return
            self.lanes.copy_row(row, to, min(max(self.used_slots(job), 1), self.lanes.state.capacity))
            self.moved(row, to)
            self.jobs[row], self.jobs[to], job.row = None, job, to

    def used_slots(self, job: Job) -> int:
        """Slots of the caches in use in the row of a request."""
        raise NotImplementedError

    def moved(self, row: int, to: int) -> None:
        """A request moves from one row to another."""
        raise NotImplementedError
