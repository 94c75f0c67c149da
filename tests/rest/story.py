"""The records of a few jobs: what the store of these tests holds."""

from rsup.supervisor.records import (
    AttemptSaved,
    BeatsSaved,
    CaseSaved,
    CheckpointSaved,
    DeviceSeen,
    EventLogged,
    IncidentSaved,
    JobKey,
    JobSaved,
    NodeSeen,
    RankSaved,
    Record,
    SectionSaved,
)

START_US = 1_764_450_000_000_000
SECOND_US = 1_000_000
EVIL = "<script>document.title='taken'</script>"
ESCAPE = "\x1b[31mred\x07"

T1 = JobKey("local", "ann", "t1", 2)
OLD_T1 = JobKey("local", "ann", "t1", 1)
RUNNING = JobKey("local", "bob", EVIL, 1)
ANNS = JobKey("local", "ann", "shared", 1)
BOBS = JobKey("local", "bob", "shared", 1)


def at(seconds: float) -> int:
    """Microseconds of that many seconds after the story's begin."""
    return START_US + round(seconds * SECOND_US)


def saved(job: JobKey, phase: str, **more: object) -> JobSaved:
    """A job's row with what the test does not care about filled in."""
    fields: dict[str, object] = {
        "epoch": 1,
        "attempt": 1,
        "created_us": at(0),
        "updated_us": at(60),
        "num_nodes": 1,
        "num_ranks": 2,
    }
    if phase == "ended":
        fields |= {"ended_us": at(60), "exit_code": 0, "reason": "all ranks exited 0"}
    return JobSaved(job=job, state=b"s", phase=phase, **{**fields, **more})  # type: ignore[arg-type]


def story_of_t1() -> list[Record]:
    """Two attempts of two ranks: rank 1 killed in iteration 25, resumed from 20, finished at 60."""
    stack: dict[str, object] = {"ranks": [0, 1], "source": "py-spy", "text": f"Thread 1 {EVIL}{ESCAPE}\n    step (train.py:7)"}
    records: list[Record] = [
        saved(T1, "ended", attempt=2, iteration=60, command="python -m train --iterations 60"),
        AttemptSaved(T1, 1, 1, at(1), at(27), at(2), 2, ["n1"], "failed", "rank 1 was killed", 0, 25),
        AttemptSaved(T1, 2, 2, at(27.2), at(60), at(28), 2, ["n1"], "succeeded", "", 20, 60),
        IncidentSaved(
            *(T1, 1, 1, at(26), "signal", 1, "n1", "GPU-b", 25),
            exit_code=137,
            signal=9,
            signal_name="SIGKILL",
            found_by="exit of the process",
            text=f"rank 1 was killed by SIGKILL {EVIL}",
            victims=[0],
            detected_us=at(26.01),
            recovered_us=at(28),
            lost_iterations=5,
            stacks=[stack],
        ),
        SectionSaved(T1, "step", 3.0, False, 0.9, 85),
        SectionSaved(T1, "setup", None, True, 1.5, 2),
    ]
    records += [RankSaved(T1, a, r, "n1", 100 + 10 * a + r, f"GPU-{'ab'[r]}") for a in (1, 2) for r in (0, 1)]
    records += [CheckpointSaved(T1, 1 if i <= 20 else 2, i, f"/ckpt/{i}", at(i), 0.2) for i in (10, 20, 30, 40, 50, 60)]
    records += [EventLogged(T1, n, at(n), at(n), "Note", f"event {n} {ESCAPE}", data={"n": n}) for n in range(1, 26)]
    records += [NodeSeen("n1", at(60), T1, "active", ["GPU-a", "GPU-b"])]
    records += [DeviceSeen(f"GPU-{'ab'[r]}", at(60), "n1", "H200", job=T1, attempt=2, rank=r) for r in (0, 1)]
    return records


def beats_of(pids: tuple[int, int] = (501, 502), iteration: int = 7) -> list[dict[str, object]]:
    """Two ranks in `step`, the second behind."""
    return [
        {
            "rank": rank,
            "node": "n2",
            "iteration": iteration - rank,
            "beat_age_s": 0.1 + rank,
            "main_beat_age_s": 0.2,
            "open_sections": [["step", 1.5 + rank]],
            "phase": "train",
            "pid": pids[rank],
        }
        for rank in (0, 1)
    ]


def story_of_running() -> list[Record]:
    """A job of bob's that runs, with a rank that looks stuck and names that try to be markup."""
    suspicion = IncidentSaved(
        *(RUNNING, 1, 1, at(10), "suspected-hang", 1, "n2", "", 6),
        section="step",
        found_by="calculated limit of section step (1 s)",
        text=f"rank 1 has been in section step for 1.5 s {EVIL}",
    )
    return [
        saved(RUNNING, "running", iteration=5, created_us=at(1), command=f"python {EVIL}"),
        AttemptSaved(RUNNING, 1, 1, at(1), None, at(2), 2, ["n2"]),
        *(RankSaved(RUNNING, 1, rank, "n2", (501, 502)[rank], f"CPU-x-{rank}") for rank in (0, 1)),
        BeatsSaved(RUNNING, at(9), beats_of(iteration=6)),
        suspicion,
        EventLogged(RUNNING, 1, at(1), at(1), "JobCreated", f"created {EVIL}"),
        NodeSeen("n2", at(9), RUNNING, "active", []),
    ]


def story_of_cases() -> list[Record]:
    """A case of t1's that accuses GPU-b and was moved to GPU-a, and one of bob's that is open."""
    finding: dict[str, object] = {
        **{"rank": 1, "device": "GPU-b", "check": "loss: NaN", "fatal": True, "initial": "nan", "in_place": "nan"},
        **{"elsewhere": "2.5", "elsewhere_rank": 1, "elsewhere_device": "GPU-a", "tolerance": 0.001, "node": "n1"},
    }
    place: dict[str, object] = {"at_us": at(26), "attempt": 2, "rank": 1, "from": "GPU-b", "to": "GPU-a", "how": "spare"}
    closed = CaseSaved(
        *(T1, "t1.2-a1-i25", 1, 25, at(25), True, [finding], at(29), "persistent"),
        reason=f"another value came out on GPU-a {EVIL}{ESCAPE}",
        action="elsewhere",
        accused=["GPU-b"],
        tried={"1": ["GPU-b"]},
        checkpoint="/ckpt/24",
        data_position={"consumed_samples": 96},
        placements=[place],
    )
    return [closed, CaseSaved(RUNNING, "evil-a1-i5", 1, 5, at(8), True, [finding], accused=["CPU-x-1"])]


def whole_story() -> list[Record]:
    """All jobs, oldest first."""
    return [*_jobs(), *story_of_cases()]


def _jobs() -> list[Record]:
    return [saved(OLD_T1, "ended"), *story_of_t1(), saved(ANNS, "ended"), saved(BOBS, "ended"), *story_of_running()]
