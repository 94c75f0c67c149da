"""Which run a launch goes on with when SLURM has started its batch script again."""

from msgspec.structs import replace

from rsup.supervisor.events import Now
from rsup.supervisor.job_routing import Routing
from rsup.supervisor.memory_store import MemoryStore
from rsup.supervisor.states import JobState, Phase
from tests.core.job_driver import hello, spec

IN_SLURM = {"job_id": "", "preferred_id": "50", "scheduler_job": "slurm-c-50"}
NOW = Now(1, 1.0)


class Script:
    """A batch script whose launches come one after the other; each ends before the next one begins."""

    def __init__(self) -> None:
        self.routing = Routing(MemoryStore(), lambda: "generated")
        self.runs: list[JobState] = []

    def launch(self, *command: str, start: int, **fields: object) -> tuple[str, int, bool]:
        """Id and run of its job, and whether that goes on with what was before."""
        asked = spec(**{**IN_SLURM, "command": list(command), "scheduler_start": start, "resume": start > 0, **fields})
        found = self.routing.job_for(hello("a", asked), self.runs, NOW)
        assert isinstance(found, JobState)
        resumed = any(run.key == found.key for run in self.runs)
        self.runs = [run for run in self.runs if run.key != found.key]
        self.runs.append(replace(found, phase=Phase.ENDED))
        return found.key.job_id, found.key.run, resumed


def test_one_launch_goes_on_though_its_command_has_a_date_in_it() -> None:
    script = Script()
    assert script.launch("train.py", "--day", "1", start=0) == ("50", 1, False)
    assert script.launch("train.py", "--day", "2", start=1) == ("50", 1, True)


def test_several_launches_of_a_script_that_starts_again_do_not_mix() -> None:
    script = Script()
    assert script.launch("train.py", start=0) == ("50", 1, False)
    assert script.launch("eval.py", start=0) == ("50", 2, False)
    assert script.launch("train.py", start=1) == ("50", 3, False)
    assert script.launch("eval.py", start=1) == ("50", 4, False)


def test_a_script_that_repeats_its_launch_goes_on_with_it() -> None:
    script = Script()
    assert script.launch("train.py", start=0) == ("50", 1, False)
    assert script.launch("train.py", start=0, resume=True) == ("50", 1, True)
    assert script.launch("train.py", start=1) == ("50", 1, True)


def test_a_job_that_somebody_has_named_goes_on_whatever_its_command() -> None:
    script = Script()
    assert script.launch("train.py", start=0, job_id="n") == ("n", 1, False)
    assert script.launch("eval.py", start=0, job_id="n") == ("n", 2, False)
    assert script.launch("train.py", start=1, job_id="n") == ("n", 2, True)
