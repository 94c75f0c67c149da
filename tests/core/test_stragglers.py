"""Slow ranks: which reports make an episode, which episodes speak against a device, and the switch of their detection."""

import math
from typing import Any

from msgspec.structs import replace

from rsup.supervisor.actions import AnswerOperator, FoundEvidence, Record
from rsup.supervisor.events import Now, OperatorAsked
from rsup.supervisor.hardware import policy
from rsup.supervisor.records import MetricsSaved, StragglerSaved
from rsup.supervisor.straggler_evidence import APART_S, TRUSTED_AFTER
from rsup.supervisor.straggler_machine import MAX_EPISODES_A_RANK
from rsup.supervisor.straggler_states import OPEN_AFTER
from rsup.supervisor.wire import (
    DeviceUsed,
    MetricBin,
    MetricsReported,
    SetLimits,
    StartAttempt,
    Straggler,
    StragglerReport,
    StragglersReported,
)
from tests.core.job_driver import KEY, START_US, Driver, info, spec

GPUS = ("GPU-0", "GPU-1", "GPU-2", "GPU-3")


class Ranks(Driver):
    """Four ranks on one node, whose clock shows a second more with each report."""

    iteration = 0

    def begin(self, devices: tuple[str, ...] = GPUS) -> "Ranks":
        """An attempt on these devices, by rank."""
        if not self.state.agents:
            self.join("a", agent=info("a", num_ranks=4))
        self.start()
        for rank, device in enumerate(devices):
            self.say("a", DeviceUsed(self.now().us, self.state.attempt, rank, device))
        return self

    def again(self, devices: tuple[str, ...] = GPUS) -> "Ranks":
        """The attempt fails, the next one runs."""
        self.exit("a", 0, 1)
        self.gone("a")
        return self.begin(devices)

    def report(self, *slow: int, times: int = 1, after_s: float = 1.0, **fields: object) -> None:
        """Reports in which these ranks are slow, each after so many seconds."""
        for _ in range(times):
            self.now_s += after_s
            first, self.iteration = self.iteration + 1, self.iteration + 10
            named = {"section": "forward-compute", "slowdown": 1.8, "individual": 0.5, "text": "it is slow", **fields}
            ones = [Straggler(rank, "", "", **named) for rank in slow]  # type: ignore[arg-type]
            report = StragglerReport(first, self.iteration, 4, stragglers=ones)
            self.say("a", StragglersReported(self.now().us, self.state.attempt, 0, report))

    def episode(self, *slow: int, **fields: Any) -> None:
        """One that begins, half an hour after what was before, and ends."""
        self.report(*slow, after_s=APART_S + 1, **fields)
        self.report(*slow, times=OPEN_AFTER - 1, **fields)
        self.report(times=OPEN_AFTER)

    def episodes(self) -> list[StragglerSaved]:
        """The newest record of each."""
        found = [a.record for a in self.actions if isinstance(a, Record) and isinstance(a.record, StragglerSaved)]
        return list({one.episode: one for one in found}.values())

    def evidence(self) -> list[tuple[str, str, str]]:
        found = [a.evidence for a in self.actions if isinstance(a, FoundEvidence)]
        return [(one.subject, one.source, one.code) for one in found]


def ranks() -> Ranks:
    return Ranks(spec(policy=spec().policy, ranks_per_node=4)).begin()


def restarting() -> Ranks:
    many = replace(spec().policy, max_restarts=20, identical_limit=20)
    return Ranks(spec(policy=many, ranks_per_node=4)).begin()


def test_some_reports_in_a_row_make_an_episode_and_as_many_without_end_it() -> None:
    job = ranks()
    job.report(2, times=OPEN_AFTER - 1)
    job.report()
    job.report(2, times=OPEN_AFTER - 1)
    assert not job.episodes(), "an interruption: counted anew"
    job.report(2)
    (open_one,) = job.episodes()
    assert (open_one.rank, open_one.device, open_one.node, open_one.attempt) == (2, "GPU-2", "node-a", 1)
    assert open_one.first == 31 and open_one.iteration == 60, "since the first report of the row"
    job.report(2, 3, slowdown=2.5, individual=0.4)
    job.report(times=OPEN_AFTER - 1)
    job.report(2)
    assert len(job.episodes()) == 1 and job.episodes()[0].to_us is None, "a breath is no end"
    job.report(times=OPEN_AFTER)
    (over,) = job.episodes()
    assert over.to_us is not None and (over.slowdown, over.individual, over.num_reports) == (2.5, 0.4, OPEN_AFTER + 2)
    seen = [event for event in job.events() if event.kind.startswith("Straggler")]
    assert [(event.kind, event.level, event.rank) for event in seen] == [
        ("StragglerSeen", "warning", 2), ("StragglerGone", "info", 2),
    ]  # fmt: skip
    assert not job.evidence(), "one episode says nothing of a device"


def test_three_that_lie_apart_speak_against_a_device_that_was_faster_before() -> None:
    job = ranks()
    for count in (1, 2):
        job.episode(1)
        assert not job.evidence(), f"{count} of 3"
    job.episode(1)
    assert job.evidence() == [("GPU-1", "straggler", "unexplained")]
    assert [one.verdict.split(" ")[0] for one in job.episodes()] == ["independent", "independent", "3"]


def test_episodes_that_follow_one_another_closely_are_one() -> None:
    job = ranks()
    for _ in range(5):
        job.report(1, times=OPEN_AFTER)
        job.report(times=OPEN_AFTER)
    assert len(job.episodes()) == 5 and not job.evidence()


def test_attempts_that_lie_apart_are_one_each_and_end_what_was_open() -> None:
    job = restarting()
    for attempt in (1, 2, 3):
        job.report(1, after_s=APART_S + 1)
        job.report(1, times=OPEN_AFTER - 1)
        assert len(job.episodes()) == attempt == len({one.attempt for one in job.episodes()})
        assert bool(job.evidence()) == (attempt == 3)
        job.again()


def test_a_new_attempt_alone_is_no_other_episode() -> None:
    job = restarting()
    for _ in range(6):
        job.report(1, times=OPEN_AFTER)
        job.again()
    assert len(job.episodes()) == 6 and not job.evidence()
    assert job.episodes()[-1].verdict.startswith("independent episode 1 of 3")


def test_what_lies_close_together_counts_with_its_end_and_its_weaker_word() -> None:
    job = restarting()
    job.episode(1)
    job.episode(1)
    job.report(1, times=OPEN_AFTER)
    job.report(1, times=3, after_s=APART_S / 2)  # a long one, which ends much later than it began
    job.report(times=OPEN_AFTER)
    job.report(1, times=OPEN_AFTER)
    assert not job.evidence() and "2 of 3" in job.episodes()[-1].verdict, "it is close to the end of the long one"
    job = restarting()
    job.episode(1)
    job.report(1, times=OPEN_AFTER, individual=0.9)
    job.report(times=OPEN_AFTER)
    for _ in range(3):
        job.episode(1)
    assert not job.evidence() and "may have more to do" in job.episodes()[-1].verdict


def test_a_rank_that_is_slower_because_all_are_is_not_the_devices_fault() -> None:
    job = ranks()
    for _ in range(4):
        job.episode(1, individual=0.5, usual=0.52)
    assert not job.evidence() and "may have more to do" in job.episodes()[-1].verdict
    assert {one.usual for one in job.episodes()} == {0.52}
    alone = ranks()
    for _ in range(3):
        alone.episode(1, individual=0.4, usual=0.9)
    assert alone.evidence() == [("GPU-1", "straggler", "unexplained")]


def test_a_report_that_is_told_again_counts_once_and_one_that_goes_back_begins_anew() -> None:
    job = ranks()
    job.report(1)
    for _ in range(OPEN_AFTER):
        job.iteration = 0
        job.report(1)
    assert not job.episodes() and job.state.stragglers.num_reports == 1
    job.report(1)
    for _ in range(2 * OPEN_AFTER):  # the same stretch in turn with the one before it
        job.iteration = 0
        job.report(1, times=2)
    assert not job.episodes(), "each time the rows begin anew"
    job.report(1)
    assert len(job.episodes()) == 1
    job.iteration = 0
    job.report(times=OPEN_AFTER - 1)
    assert job.episodes()[0].to_us is None, "an open one goes on over it"
    job.report()
    assert job.episodes()[0].to_us is not None


def test_a_cause_that_comes_and_goes_accuses_once() -> None:
    job = ranks()
    job.episode(1, cause="thermal")
    job.report(1, after_s=APART_S + 1, cause="thermal")
    job.report(1, times=OPEN_AFTER - 1, cause="thermal")
    assert job.evidence() == [("GPU-1", "straggler", "thermal")]
    for cause in ("power", "", "data", "thermal", "clocks"):
        job.report(1, cause=cause)
    assert len(job.evidence()) == 1 and job.episodes()[-1].cause == "thermal", "the device's first cause stays"
    plain = ranks()
    for _ in range(2):
        plain.episode(1)
    plain.report(1, after_s=APART_S + 1)
    plain.report(1, times=OPEN_AFTER - 1)
    for cause in ("host", "", "thermal", "power"):
        plain.report(1, cause=cause)
    assert plain.evidence() == [("GPU-1", "straggler", "unexplained")] and plain.state.stragglers.accused == [3]
    plain.report(times=OPEN_AFTER)
    assert not plain.state.stragglers.accused


def test_a_rank_names_no_device_and_node_of_its_own() -> None:
    job = Ranks(spec(ranks_per_node=4)).begin(GPUS[:1])
    job.say("a", StragglersReported(job.now().us, 1, 0, StragglerReport(1, 2, 4)))
    for first in (3, 5, 7):
        slow = Straggler(3, "GPU-of-another-job" * 1000, "n" * 100_000, "step", 2.0, 0.5, text="t")
        job.say("a", StragglersReported(job.now().us, 1, 0, StragglerReport(first, first + 1, 4, stragglers=[slow])))
    (one,) = job.episodes()
    assert (one.rank, one.device, one.node) == (3, "", "node-a") and "no device is known" in one.verdict


def test_beyond_a_bound_episodes_are_only_counted() -> None:
    job = ranks()
    for _ in range(MAX_EPISODES_A_RANK + 3):
        job.report(1, times=OPEN_AFTER + 2)
        job.report(times=OPEN_AFTER)
    job.report(2, times=OPEN_AFTER)
    known = job.state.stragglers
    assert len(job.episodes()) == known.num_episodes == MAX_EPISODES_A_RANK + 1 and known.num_untold == 3
    seen = [event for event in job.events() if event.kind == "StragglerSeen"]
    assert len(seen) == MAX_EPISODES_A_RANK + 1
    assert [event.text.endswith("only counted") for event in seen[-3:]] == [False, True, False]


def test_a_switch_that_nobody_hears_says_so() -> None:
    job = restarting()
    job.exit("a", 0, 1)
    job.gone("a")
    actions = job.feed(OperatorAsked("stragglers-on", "ann", "", "r1"))
    (answer,) = [one for one in actions if isinstance(one, AnswerOperator)]
    assert answer.done and "from the next attempt on" in answer.message


def test_a_rank_that_was_never_faster_has_more_to_do() -> None:
    job = restarting()
    for _ in range(6):
        job.report(3, after_s=APART_S + 1, individual=1.0)
        job.report(3, times=OPEN_AFTER - 1, individual=1.0)
        job.again()
    assert len(job.episodes()) == 6 and not job.evidence()
    assert "may have more to do" in job.episodes()[-1].verdict


def test_slowness_that_goes_with_the_rank_is_not_the_devices() -> None:
    job = restarting()
    for _ in range(2):
        job.report(1, times=OPEN_AFTER)
        job.again()
    job.again(("GPU-1", "GPU-0", "GPU-2", "GPU-3"))
    for _ in range(4):
        job.report(1, times=OPEN_AFTER)
        job.again(("GPU-1", "GPU-0", "GPU-2", "GPU-3"))
    assert {one.device for one in job.episodes()} == {"GPU-0", "GPU-1"} and not job.evidence()
    assert job.episodes()[-1].verdict == "not the device: rank 1 was as slow on GPU-1"


def test_a_device_that_is_slow_under_two_ranks_is_spoken_against_whatever_it_did_before() -> None:
    job = restarting()
    for devices, rank in ((GPUS, 1), (GPUS, 1), (("GPU-1", "GPU-0", "GPU-2", "GPU-3"), 0)):
        job.again(devices)
        job.report(rank, after_s=APART_S + 1 if devices is GPUS else 1.0, individual=1.0)
        job.report(rank, times=OPEN_AFTER - 1, individual=1.0)
    assert job.evidence() == [("GPU-1", "straggler", "unexplained")]


def test_a_device_that_is_fine_under_another_rank_is_cleared() -> None:
    job = restarting()
    for _ in range(2):
        job.report(1, times=OPEN_AFTER)
        job.again()
    job.again(("GPU-1", "GPU-0", "GPU-2", "GPU-3"))
    job.report(times=TRUSTED_AFTER)
    assert job.state.stragglers.cleared == {"GPU-1": 2}
    job.again()
    job.report(1, times=OPEN_AFTER)
    assert not job.evidence() and job.episodes()[-1].verdict.startswith("independent episode 1 of 3")


def test_sensors_that_name_the_device_need_two_and_others_causes_none() -> None:
    job = ranks()
    job.episode(0, cause="data")
    job.episode(0, cause="host")
    job.episode(0, cause="work")
    assert not job.evidence() and {one.verdict[:14] for one in job.episodes()} == {"not the device"}
    job.episode(1, cause="thermal", individual=1.0)
    assert not job.evidence()
    job.episode(1, cause="thermal", individual=1.0)
    assert job.evidence() == [("GPU-1", "straggler", "thermal")]


def test_a_cause_that_shows_later_counts_from_then_on() -> None:
    job = ranks()
    job.episode(1, cause="power")
    job.report(1, after_s=APART_S + 1)
    job.report(1, times=OPEN_AFTER - 1)
    assert not job.evidence() and "2 of 3" in job.episodes()[-1].verdict
    job.report(1, cause="power", text="a secret word")
    assert job.evidence() == [("GPU-1", "straggler", "power")] and "its sensors: power" in job.episodes()[-1].verdict
    (found,) = [a.evidence for a in job.actions if isinstance(a, FoundEvidence)]
    assert found.is_held and "secret" not in found.text and "rank 1 on node-a" in found.text
    job.report(1, times=3, cause="power")
    assert len(job.evidence()) == 1, "once an episode"


def test_a_rank_without_a_gpu_accuses_nobody() -> None:
    job = Ranks(spec(ranks_per_node=4)).begin(tuple(f"CPU-boot-{rank}" for rank in range(4)))
    for _ in range(4):
        job.episode(1)
    assert len(job.episodes()) == 4 and not job.evidence()


def test_what_it_weighs_is_watch_unless_the_sensors_say_so_in_several_jobs() -> None:
    rules = policy.built_in()
    plain, named = (rules.rule("device", "straggler", code) for code in ("unexplained", "thermal"))
    assert (plain.first, plain.repeat, plain.weight) == ("watch", "", 0.0)
    assert (named.first, named.repeat, named.repeat_count, named.drain) == ("watch", "suspect", 3, "never")


def test_reports_out_of_bounds_and_of_another_attempt_do_nothing() -> None:
    job = restarting()
    job.report(99, -1, times=OPEN_AFTER)
    for odd in (math.nan, math.inf, -1.0, 0.5):
        job.report(1, times=OPEN_AFTER, slowdown=odd)
    job.report(1, times=OPEN_AFTER, individual=math.nan)
    for first, last in ((5, 1), (-1, 3)):
        job.say("a", StragglersReported(START_US, 1, 0, StragglerReport(first, last, 4)))
    job.again()
    before = len(job.events())
    job.say("a", StragglersReported(START_US, 1, 0, StragglerReport(1, 2, 4)))
    job.say("a", MetricsReported(START_US, 1, 0, "training", {"loss": [MetricBin.of(1, 1, 1, 1.0)]}))
    assert not job.episodes() and len(job.events()) == before, "late ones have no line each"


def test_the_switch_reaches_running_ranks_and_later_attempts() -> None:
    job = restarting()

    def ask(kind: str, request: str, dry_run: bool = False) -> str:
        actions = job.feed(OperatorAsked(kind, "ann", "to see", request, dry_run=dry_run))
        (answer,) = [one for one in actions if isinstance(one, AnswerOperator)]
        assert answer.done
        return answer.message

    assert ask("stragglers-on", "r0", dry_run=True).startswith("would switch") and not job.state.switches
    assert "switched on" in ask("stragglers-on", "r1")
    told = job.last_command("a")
    assert isinstance(told, SetLimits) and told.switches == {"stragglers": True} and "ann (to see)" in told.reason
    assert "already" in ask("stragglers-on", "r2") and job.last_command("a") is not None
    num = len(job.state.agents["a"].outbox)
    job.again()
    started = next(c for c in job.state.agents["a"].outbox[num:] if isinstance(c, StartAttempt))
    assert started.switches == {"stragglers": True}
    ask("stragglers-off", "r3")
    assert job.state.switches == {"stragglers": False}
    assert [event.principal for event in job.events() if event.kind == "Switched"] == ["ann", "ann"]


def test_metrics_are_kept_and_decide_nothing() -> None:
    job = ranks()
    before = replace(job.state, agents={}, num_events=0)
    bad = MetricBin(5, 1, 0, 0, 1.0, 1.0, 1.0, 1.0)
    series = {"lm loss": [MetricBin.of(1, 1, 8, 2.0)], "a\nb": [MetricBin.of(1, 1, 8, 2.0)], "odd": [bad]}
    for odd in (
        MetricBin(1, 1, 0, 0, 1.0, 1.0, 1.0, 1.0, count=2),
        MetricBin(0, 2**62 - 1, 0, 0, 1.0, 1.0, 1.0, 1.0, count=2**62 - 1),
        MetricBin(1, 1, 2**62 - 1, 0, 1.0, 1.0, 1.0, 1.0),
        MetricBin(1, 1, 0, -1, 1.0, 1.0, 1.0, 1.0),
    ):
        series[f"odd {len(series)}"] = [odd]
    job.say("a", MetricsReported(START_US, 1, 0, "training", series))
    job.say("a", MetricsReported(START_US, 1, 0, "what a newer release has", series))
    kept = [a.record for a in job.actions if isinstance(a, Record) and isinstance(a.record, MetricsSaved)]
    assert [(one.job, one.kind, list(one.series)) for one in kept] == [(KEY, "training", ["lm loss"])]
    assert replace(job.state, agents={}, num_events=0) == before
    assert isinstance(job.now(), Now)
