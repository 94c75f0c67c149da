"""Exit codes 16 and 17 of Megatron-LM's rerun machine, with scripts that leave as it does: a line in the tracker file, then the
code; on the next start it compares node and ordinal with those of the first run, and knows nothing else of devices."""

import json
import os
import re

from tests.jobs.conftest import Place

FLAG = "--result-rejected-tracker-filename"

MEGATRON = """
import datetime, json, os, sys, time
rank, ordinal = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
options = dict(word.split("=", 1) for word in sys.argv[1:] if "=" in word)
tracker, out = options["--result-rejected-tracker-filename"], os.environ["OUT"]
failing, verdict = int(options.get("--failing-rank", "0")), options["--verdict"]
state = f"{out}/state.json"
with open(f"{out}/seen-{attempt}-{rank}.json", "w") as file:
    json.dump({"ordinal": ordinal}, file)
node = os.uname().nodename

def track(status):
    with open(tracker, "a") as file:
        file.write(f"ts={datetime.datetime.now()} node={os.uname().nodename} device={ordinal} jobID=N/A rank={rank} "
                   f"iteration=5 status=RerunValidationStatus.{status} result=nan message='found NaN in local forward loss'\\n")

def meet(name):
    open(f"{out}/{name}-{attempt}-{rank}", "w").close()
    while len([f for f in os.listdir(out) if f.startswith(f"{name}-{attempt}-")]) < int(os.environ["WORLD_SIZE"]):
        time.sleep(0.01)

if not os.path.exists(state):
    meet("first")
    if rank == failing:
        track("INITIAL_RUN")
        if verdict == "TRANSIENT":
            track("FIRST_RERUN_NOT_REPRODUCIBLE")
        else:
            track("FIRST_RERUN_REPRODUCIBLE")
    meet("judged")
    if rank == failing and verdict != "TRANSIENT":
        with open(state + ".tmp", "w") as file:
            json.dump([node, ordinal], file)
        os.rename(state + ".tmp", state)
    sys.exit(17 if verdict == "TRANSIENT" else 16)
meet("first")
again = json.load(open(state)) == [node, ordinal]
if rank == failing:
    if not again:
        track(verdict)
    open(f"{out}/again-{attempt}", "w").write(str(again))
meet("judged")
sys.exit(16 if open(f"{out}/again-{attempt}").read() == "True" else 17)
"""


def ordinals(place: Place, attempt: int) -> dict[int, int]:
    """Rank -> the ordinal that it had in an attempt."""
    found = {int(path.stem.split("-")[2]): path for path in place.folder.glob(f"seen-{attempt}-*.json")}
    return {rank: int(json.loads(path.read_text())["ordinal"]) for rank, path in sorted(found.items())}


def run(place: Place, verdict: str, code: int, *options: str, ranks: int = 2) -> str:
    """A job that a rank's rejected result ends; its launcher's stderr."""
    tracker = place.folder / "tracker"
    script = place.script(MEGATRON)
    arguments = ["--nproc-per-node", str(ranks), "--job-id", "m", *options, script, f"{FLAG}={tracker}", f"--verdict={verdict}"]
    return place.launch(*arguments).ends(code).stderr


def test_16_runs_again_on_another_device_and_17_ends_the_job(place: Place) -> None:
    stderr = run(place, "SECOND_RERUN_NOT_REPRODUCIBLE", 17)
    assert ordinals(place, 0) == {0: 0, 1: 1} and ordinals(place, 1) == {0: 1, 1: 0}
    assert not ordinals(place, 2)
    assert "persistent" in stderr and "iteration 5" in stderr
    status = place.status("m")
    assert status["job"]["exit_code"] == 17 and len(status["attempts"]) == 2
    incident = status["incidents"][0]
    assert incident["rank"] == 0 and incident["iteration"] == 5 and re.fullmatch(r"CPU-.*-0", incident["device"])
    events = place.rsup("events", "m")
    assert "rank 0 runs it again on another device, which costs no restart" in events
    assert re.search(r"rank 0 runs on CPU-\S+-1 in place of CPU-\S+-0 \(LOCAL_RANK 1, was 0\): .*found NaN", events)
    started = [e for e in json.loads(place.rsup("events", "m", "--json")) if e["kind"] == "AttemptStarted"]
    first, second = (event["data"]["devices"] for event in started)
    assert second == first[::-1]


def test_the_rank_is_named_whoever_leaves_first(place: Place) -> None:
    tracker, script = place.folder / "tracker", place.script(MEGATRON)
    place.launch(
        *("--nproc-per-node", "3", "--job-id", "m", script),
        *(f"{FLAG}={tracker}", "--verdict=SECOND_RERUN_REPRODUCIBLE", "--failing-rank=1"),
    ).ends(17)
    after = ordinals(place, 1)
    assert after[1] != 1 and sorted(after.values()) == [0, 1, 2] and sum(after[r] != r for r in after) == 2
    assert "application" in place.status("m")["job"]["reason"]


def test_a_transient_verdict_ends_with_17_at_once(place: Place) -> None:
    stderr = run(place, "TRANSIENT", 17, "--max-restarts", "3")
    assert "transient" in stderr and len(place.status("m")["attempts"]) == 1


def test_the_only_device_ends_with_16(place: Place) -> None:
    stderr = run(place, "SECOND_RERUN_REPRODUCIBLE", 16, "--max-restarts", "3", ranks=1)
    assert "no other device for rank 0 in this allocation" in stderr
    assert len(place.status("m")["attempts"]) == 1


def test_codes_without_a_line_of_this_attempt_are_ordinary_failures(place: Place) -> None:
    tracker = place.folder / "tracker"
    node = os.uname().nodename
    line = (
        f"ts=now node={node} device=0 jobID=N/A rank=0 iteration=5 status=FIRST_RERUN_REPRODUCIBLE result=nan message='NaN'\n"
    )
    tracker.write_text(line)
    leaves = place.script("import os, sys; sys.exit(int(sys.argv[1]))")
    for code in ("16", "17"):
        place.launch("--nproc-per-node", "2", leaves, code, FLAG, str(tracker)).ends(1)
        place.launch("--nproc-per-node", "1", leaves, code).ends(1)
    other = line.replace("rank=0", "rank=7") + line.replace(node, "elsewhere") + line.replace("N/A", "4711")
    adds = place.script(f"import sys; open(sys.argv[2], 'a').write({other!r}); sys.exit(16)", "adds.py")
    place.launch("--nproc-per-node", "1", adds, "--result-rejected-tracker", str(tracker)).ends(1)


def test_a_rank_killed_in_the_rerun_still_stays_away_from_its_device(place: Place) -> None:
    script = place.script(MEGATRON.replace("again = json", "attempt == 1 and os.kill(os.getpid(), 9)\nagain = json"))
    tracker = place.folder / "tracker"
    launched = place.launch(
        *("--nproc-per-node", "2", "--job-id", "m", "--max-restarts", "1", script),
        *(f"{FLAG}={tracker}", "--verdict=SECOND_RERUN_REPRODUCIBLE"),
    )
    launched.ends(17)
    assert ordinals(place, 1) == ordinals(place, 2) == {0: 1, 1: 0}
