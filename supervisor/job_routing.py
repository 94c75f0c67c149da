"""Which job an agent's `Hello` is about: a live one, one that has ended meanwhile, one that we have forgotten, or a new one."""

import secrets
import time
from collections.abc import Callable, Iterable

from rsup.supervisor.events import Now
from rsup.supervisor.records import JobKey
from rsup.supervisor.rendezvous import new_job, resumed_job
from rsup.supervisor.states import JobState, Phase, StateUnreadable, decode
from rsup.supervisor.store import Store
from rsup.supervisor.wire import Hello, JobSpec, Refusal


def generated_job_id() -> str:
    """A short id that people can read and say, e.g. `20261129-a1b2c3`."""
    return f"{time.strftime('%Y%m%d')}-{secrets.token_hex(3)}"


class Routing:
    """Finds or makes the state that a `Hello` of an agent unknown to every live job is decided on."""

    def __init__(self, store: Store, new_job_id: Callable[[], str] | None = None) -> None:
        self._store = store
        self._new_job_id = new_job_id or generated_job_id

    def job_for(self, hello: Hello, live: Iterable[JobState], now: Now) -> JobState | Refusal:
        """The job, or why there is none. Raise `StoreError`."""
        spec = hello.spec
        live = [state for state in live if (state.key.cluster, state.key.owner) == (spec.cluster, spec.owner)]
        if hello.agent.gone:
            return Refusal(1, f"agent {hello.agent.agent_id} belongs to no live job")
        if hello.job_id:
            earlier = self._earlier(hello, live, now)
            if earlier is not None:
                return earlier
        running = [state for state in live if state.phase is not Phase.ENDED]
        job_id = spec.job_id or hello.job_id
        if job_id:
            named = next((state for state in running if state.key.job_id == job_id), None)
            return named or self._next_run(job_id, spec, live, now)
        grouped = next((state for state in running if _same_group(state.spec, spec)), None)
        return grouped or self._next_run(self._id_for(spec, running), spec, live, now)

    def _id_for(self, spec: JobSpec, running: list[JobState]) -> str:
        """The id for a job whose agents name none: launches of one SLURM job beside one another get one each."""
        taken = {state.key.job_id for state in running}
        return spec.preferred_id if spec.preferred_id and spec.preferred_id not in taken else self._new_job_id()

    def _earlier(self, hello: Hello, live: list[JobState], now: Now) -> JobState | Refusal | None:
        """The job that the agent says it belongs to, where it is not simply to join a job."""
        key = JobKey(hello.spec.cluster, hello.spec.owner, hello.job_id, hello.run)
        for state in live:
            if state.key == key:
                return state
        found = self._store.last_run(key.cluster, key.owner, key.job_id)
        if found is not None and found[0].run >= key.run:
            ended = _readable(found[1])
            if found[0].run > key.run:
                return _told_late(key, found[0].run, ended)
            if ended is not None and ended.phase is Phase.ENDED:
                return ended
        return new_job(key, hello.spec, now) if hello.attempt else None

    def _next_run(self, job_id: str, spec: JobSpec, live: list[JobState], now: Now) -> JobState:
        found = self._store.last_run(spec.cluster, spec.owner, job_id)
        old = max((state for state in live if state.key.job_id == job_id), key=lambda state: state.key.run, default=None)
        if found is None and old is None:
            return new_job(JobKey(spec.cluster, spec.owner, job_id, 1), spec, now)
        if found is not None and (old is None or old.key.run < found[0].run):
            key, old = found[0], _readable(found[1])
        else:  # it has ended in this very turn: the store does not know yet
            assert old is not None
            key = old.key
        if spec.resume and old is not None and not _is_of_another_launch(old, spec):
            return resumed_job(old, spec, now)
        return new_job(JobKey(key.cluster, key.owner, key.job_id, key.run + 1), spec, now, old)


def starts_before(spec: JobSpec, live: Iterable[JobState]) -> list[JobState]:
    """Live jobs of earlier starts of the scheduler's job that an agent of `spec` is part of: nothing of them is left."""
    if not spec.scheduler_job or not spec.scheduler_start:
        return []
    return [
        state
        for state in live
        if state.phase is not Phase.ENDED
        and (state.key.cluster, state.key.owner) == (spec.cluster, spec.owner)
        and state.spec.scheduler_job == spec.scheduler_job
        and state.spec.scheduler_start < spec.scheduler_start
    ]


def _is_of_another_launch(old: JobState, spec: JobSpec) -> bool:
    """Whether that run is another command's of the same batch script: the scheduler's job gives its id to all of them, one
    after the other. A command may differ from start to start (a date in it), where the script has only one."""
    before = old.spec
    if spec.job_id or not spec.scheduler_job or before.scheduler_job != spec.scheduler_job or before.command == spec.command:
        return False
    return old.key.run > 1 or before.scheduler_start == spec.scheduler_start


def _readable(data: bytes) -> JobState | None:
    try:
        return decode(data)
    except StateUnreadable:
        return None


def _told_late(key: JobKey, newest_run: int, newest: JobState | None) -> Refusal:
    """What an agent of a run hears that has ended, and been followed by another, without its knowledge."""
    text = f"run {key.run} of job {key.job_id} is over, run {newest_run} has been started since"
    result = newest.run_before if newest is not None and newest_run == key.run + 1 else None
    return Refusal(1, text) if result is None else Refusal(result.exit_code, f"{text}: {result.reason}")


def _same_group(ours: JobSpec, theirs: JobSpec) -> bool:
    """Whether agents without a job id belong together: by rendezvous id, or as the nodes of one endpoint."""
    if ours.max_nodes == 1 or theirs.max_nodes == 1 or ours.rdzv_id != theirs.rdzv_id or not _same_port(ours, theirs):
        return False
    if ours.rdzv_id != "none":
        return True
    same = (ours.min_nodes, ours.max_nodes, ours.command) == (theirs.min_nodes, theirs.max_nodes, theirs.command)
    return same and bool(ours.listen)


def _same_port(ours: JobSpec, theirs: JobSpec) -> bool:
    """Nodes may know the host they meet at by different names, but never the port."""
    ports = {spec.endpoint.rpartition(":")[2] for spec in (ours, theirs) if spec.endpoint}
    return len(ports) <= 1
