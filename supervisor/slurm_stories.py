"""Jobs whose launches keep a state directory of their own, found by who asks without saying where.

In a SLURM job a launch has its state in `slurm/CLUSTER-JOB` below the user's state directory. Who types `rsup status 4711` on
a login node means that one. Where a shared supervisor serves the host it is asked, and the user's usual directory holds what
was launched without it; else that directory is asked first. Nothing here costs anything where the first has the answer (but for
lists), or where there is no other directory.
"""

import contextlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from rsup.supervisor import places
from rsup.supervisor.job_name import JobName
from rsup.supervisor.principals import owner_name
from rsup.supervisor.query_source import Json, NoAnswer, Source, name_of
from rsup.supervisor.rest_source import RestSource
from rsup.supervisor.sources import Answer, Sources
from rsup.supervisor.wire import RsupError

DATABASE_NAME = "rsup.db"
MAX_FOLDERS = 500
"""So many are looked into for one question, those that were written last."""

NEWEST_FOLDERS = 20
"""The newest job is in one of so many."""


def slurm_folders(state: Path) -> list[Path]:
    """State directories of SLURM jobs below that one, those that were written last first."""
    found: list[tuple[float, Path]] = []
    with contextlib.suppress(OSError), os.scandir(state / "slurm") as entries:
        for entry in entries:
            times = [_written_s(Path(entry.path, name)) for name in ("rsup.db", "rsup.db-wal", "supervisor.json")]
            if any(times):
                found.append((max(times), Path(entry.path)))
    return [path for _, path in sorted(found, reverse=True)][:MAX_FOLDERS]


def _written_s(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


class StorySources(Sources):
    """The usual source, then the user's own directory where that is another, and those of SLURM's jobs; the one that knows the
    job answers from then on. `job`: as it was given, to look first where it is likely to be."""

    def __init__(self, state: Path, note: Callable[[str], None], job: str = "") -> None:
        super().__init__(state, "", note, host_first=True)
        self._job = job
        self._chosen: Sources | None = None

    def read(self, question: Callable[[Source], Answer]) -> Answer:
        """The answer of the first that has one."""
        if self._chosen is not None:
            return self._chosen.read(question)
        if self._job and self._running() is not None and self._own():  # what runs under it is meant before an older one
            with contextlib.suppress(RsupError):
                return self._of_folder(self._state, question)
        try:
            return super().read(question)
        except RsupError:
            for folder in [*self._own(), *self._likely()]:
                with contextlib.suppress(RsupError):
                    return self._of_folder(folder, question)
            raise

    def supervisor(self) -> RestSource:
        """The running supervisor: that of the job, where one was named. Raise `NoAnswer` where none runs."""
        if self._chosen is None and self._job and (self._own() or slurm_folders(self._state)):
            with contextlib.suppress(RsupError):  # that nobody knows it is said by whoever is asked
                self.read(lambda source: source.status(JobName("", "", self._job), stacks=False))
        return super().supervisor() if self._chosen is None else self._chosen.supervisor()

    def _of_folder(self, folder: Path, question: Callable[[Source], Answer]) -> Answer:
        notes: list[str] = []
        sources = Sources(folder, "", notes.append, own_only=True)
        answer = sources.read(question)
        self._choose(folder, sources, notes)
        return answer

    def _own(self) -> list[Path]:
        """The user's own directory, where the usual source is a supervisor that has nothing to do with it."""
        return [self._state] if os.path.exists(self._state / DATABASE_NAME) and self.asks_the_host() else []

    def jobs(self, limit: int, state: str, owner: str) -> list[Json]:
        """The newest jobs of all; those of a SLURM job's own directory say which (`state_dir`)."""
        folders = slurm_folders(self._state)
        if not state and not owner:  # each has a job to show
            folders = folders[:limit]
        folders = [*self._own(), *folders]
        return self._merged(folders, lambda source: source.jobs(limit, state, owner), _run_of, "created", limit)

    def cases(self, limit: int, verdict: str) -> list[Json]:
        """The newest cases of all, in the same way."""
        folders = [*self._own(), *slurm_folders(self._state)]
        return self._merged(folders, lambda source: source.cases(None, limit, verdict), _case_of, "opened", limit)

    def newest(self) -> JobName:
        """The newest job of all: one's own if there is any."""
        folders, owner = [*self._own(), *slurm_folders(self._state)[:NEWEST_FOLDERS]], owner_name()
        found = self._merged(folders, lambda source: source.jobs(1, "", owner) or source.jobs(1, "", ""), _run_of, "created", 1)
        if not found:
            return super().newest()  # which says that there is none
        if folder := found[0].get("state_dir"):
            self._choose(Path(folder), Sources(Path(folder), "", self._note, own_only=True), [])
        return name_of(found[0])

    def _choose(self, folder: Path, sources: Sources, notes: list[str]) -> None:
        self._chosen = sources
        sources.tell(self._note)
        what = "this job, which was launched without this host's supervisor," if folder == self._state else "this SLURM job"
        for text in [f"the state of {what} is in {folder}", *notes]:
            self._note(text)

    def _likely(self) -> list[Path]:
        word = self._job.rpartition("/")[2]
        names = [name for name in (word, word.rpartition(".")[0]) if name]
        return sorted(slurm_folders(self._state), key=lambda path: not any(path.name.endswith(f"-{name}") for name in names))

    def _merged(
        self,
        folders: Sequence[Path],
        question: Callable[[Source], list[Json]],
        identity: Callable[[Json], object],
        age: str,
        limit: int,
    ) -> list[Json]:
        try:
            items = super().read(question)
        except NoAnswer as error:
            if not folders:
                raise
            items = []
            self._note(str(error))
        known = {identity(one) for one in items}
        found = _dated(items, age)
        for folder in folders:
            try:
                items = Sources(folder, "", lambda text: None, own_only=True).read(question)
            except RsupError as error:
                self._note(f"{folder}: {error}")
                continue
            more = [{**one, "state_dir": str(folder)} for one in items if identity(one) not in known]
            found += _dated(more, age)
        return [one for _, one in sorted(found, key=lambda dated: dated[0], reverse=True)][:limit]


def _dated(items: Sequence[Json], age: str) -> list[tuple[str, Json]]:
    """Each with its time. `items` have the newest first; one of another user's, of which no time is told, gets that of the next
    one down, so that it keeps its place among them."""
    found: list[tuple[str, Json]] = []
    when = ""
    for one in reversed(items):
        when = one.get(age) or when
        found.insert(0, (when, one))
    return found


def _run_of(job: Json) -> object:
    return job["cluster"], job["owner"], job["id"], job["run"]


def _case_of(case: Json) -> object:
    return case["case_id"], _run_of(case["job"])


def story_sources(state_dir: str | None, url: str, note: Callable[[str], None], job: str = "") -> Sources:
    """Where a question about jobs gets its answer: where somebody says, else also from the directories of own launches."""
    state = places.state_dir_to_read(state_dir)
    if url or os.environ.get("RSUP_SUPERVISOR_URL") or not places.names_no_state_dir(state_dir):
        return Sources(state, url, note)
    return StorySources(state, note, job)
