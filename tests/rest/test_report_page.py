"""`rsup report`'s page, from the store and from a supervisor, and in a real browser: it asks nobody, runs nothing, and fits."""

import html
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from rsup.launcher import cli
from rsup.supervisor import report_sources
from rsup.supervisor.records import (
    AttemptSaved,
    CheckpointSaved,
    EventLogged,
    IncidentSaved,
    JobKey,
    MetricsSaved,
    RankSaved,
    Record,
    StragglerSaved,
)
from rsup.supervisor.sql_store import SqlStore
from rsup.supervisor.states import JobState, Phase, encode
from rsup.supervisor.wire import JobSpec, MetricBin
from tests.rest.played import TOKENS, Served
from tests.rest.story import EVIL, T1, at, saved
from tests.rest.test_page import CHROMIUM, FLAGS

HOSTILE = JobKey("local", "bob", f"{EVIL}<img src=http://hostile.invalid/x onerror=alert(1)>", 1)
BIG = JobKey("local", "ann", "big", 1)
EVIL_NAME = "<b onclick=x>&\"'</b>"
RESTARTS, RANKS = 200, 1000


@pytest.fixture
def here(own_directories: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current directory."""
    folder = own_directories / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def told(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> tuple[str, str]:
    """Run a command in this process; return its stdout and stderr."""
    assert cli.main(list(words)) == code
    output = capsys.readouterr()
    return output.out, output.err


def bins(values: dict[int, float]) -> list[MetricBin]:
    return [MetricBin.of(i, at(i / 10), 8 * i, value) for i, value in values.items()]


def numbers_of(job: JobKey, iterations: int) -> list[Record]:
    """Curves of all kinds, with gaps and names that try to be markup."""
    steps = range(1, iterations + 1)
    training = {
        "lm loss": bins({i: 5 / math.sqrt(i) if i != 40 else math.nan for i in steps}),
        "iteration-time": bins({i: 0.1 + (i % 10) / 100 for i in steps}),
        "learning-rate": bins({i: 1e-4 * i / iterations for i in steps}),
        "grad-norm": bins({i: 100.0 / i for i in steps}),
        EVIL_NAME: bins({1: 2.0, 2: 3.0}),
    }
    kinds = {
        "training": training,
        "validation": {"lm loss validation": bins({i: 4.0 / i for i in steps if i % 20 == 0})},
        "timers": {f"part-{n}-time": bins({i: 0.01 * n for i in steps}) for n in range(1, 12)},
        "memory": {"mem-allocated-bytes": bins({i: 7.3e10 + 1e9 * (i % 3) for i in steps})},
        "straggler": {f"rank-{rank}-ms": bins({i: 10.0 + rank for i in steps}) for rank in range(4)},
        "energy": {"power/gpu": bins({i: 612.5 for i in steps})},
        "end_to_end": {"app_wall_time": bins({9: 60.0}), "train_iterations_time_total_productive": bins({9: 31.5})},
    }
    return [MetricsSaved(job, 1, 0, kind, series) for kind, series in kinds.items()]


def hostile() -> list[Record]:
    """A live job whose every text is an attack."""
    slow = StragglerSaved(
        *(HOSTILE, 1, 1, 3, f"GPU-{EVIL}", EVIL, EVIL, at(5), at(9), 50, 90, 4, 1.83, 0.6), cause=EVIL, text=EVIL, verdict=EVIL
    )
    state = JobState(key=HOSTILE, spec=JobSpec(), created_us=at(0), phase=Phase.RUNNING, attempt=1)
    incident = IncidentSaved(
        *(HOSTILE, 1, 1, at(10), "in-process", 1, EVIL, f"GPU-{EVIL}", 40), found_by=EVIL, text=EVIL, detected_us=at(10),
        recovered_us=at(12), lost_iterations=3,
    )  # fmt: skip
    return [
        replace(saved(HOSTILE, "running", command=EVIL, reason=EVIL), state=encode(state)),
        AttemptSaved(HOSTILE, 1, 1, at(1), None, at(2), 2, [EVIL], reason=EVIL),
        *(RankSaved(HOSTILE, 1, rank, EVIL, 501, f"GPU-{EVIL}") for rank in (0, 1)),
        incident,
        slow,
        EventLogged(HOSTILE, 1, at(1), at(1), "SaveFailed", EVIL),
        *numbers_of(HOSTILE, 100),
    ]


def big() -> list[Record]:
    """A job of many ranks that was restarted again and again."""
    records: list[Record] = [saved(BIG, "ended", attempt=RESTARTS + 1, iteration=2000, num_ranks=RANKS, num_nodes=125)]
    for n in range(RESTARTS + 1):
        began, end = n * 0.29, n * 0.29 + 0.28
        outcome = ("failed", f"rank {n} was killed by SIGKILL") if n < RESTARTS else ("succeeded", "")
        times = (at(began), at(end), at(began + 0.05))
        records.append(AttemptSaved(BIG, n + 1, n + 1, *times, RANKS, ["n"], *outcome, n * 9, n * 9 + 10))
        if n % 10 == 0:  # so far apart that labels of three digits have room, those of four have none
            records.append(CheckpointSaved(BIG, n + 1, n * 9 + 9, f"/checkpoints/iter_{n:07}", at(end)))
        if n < RESTARTS:
            text = f"rank {n} was killed by SIGKILL"
            records.append(
                IncidentSaved(BIG, n + 1, n + 1, at(end - 0.1), "signal", n, "n1", f"GPU-{n}", n * 9 + 10, text=text)
            )
    records += [RankSaved(BIG, RESTARTS + 1, r, f"n{r // 8}", 1, f"GPU-{r}", exit_code=0) for r in range(RANKS)]
    records += [EventLogged(BIG, n, at(0), at(0), "Note", f"event {n}") for n in range(1, 2500)]
    return [*records, *numbers_of(BIG, 900)]


def test_text_to_stdout_and_the_page_beside(story: SqlStore, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, err = told(capsys, "report", "t1")
    page = here / "rsup-report-t1.2.html"
    assert "Job t1.2 of ann: succeeded" in out and err.splitlines()[-1] == f"rsup: the page is in {page}"
    content = page.read_text("utf-8")
    assert "reported no numbers of its training" in content and "SIGKILL" in content and "goodput 84.0 %" in content
    assert "GPU-b" in content and "persistent" in content and "no script reported end-to-end metrics" in content
    assert "http://" not in content and "https://" not in content and "<script" not in content and "url(" not in content
    page.unlink()
    whole, err = told(capsys, "report", "t1", "--output", "-")
    assert whole.startswith("<!doctype html>") and whole.endswith("</html>\n") and "Job t1.2" not in whole
    assert told(capsys, "report", "t1", "--text")[0] == out
    assert json.loads(told(capsys, "report", "t1", "--json")[0])["report"] and not list(here.iterdir())
    assert "leave one of them out" in told(capsys, "report", "t1", "--text", "--output", "x", code=2)[1]
    out, err = told(capsys, "report", "t1", "--output", "/nowhere/x.html", code=1)
    (line,) = err.splitlines()[1:]
    assert out and line.startswith("rsup report: the page cannot be written to /nowhere/x.html: No such file or directory; ")
    assert told(capsys, "report", "t1.1", "--output", "sub.html") and (here / "sub.html").is_file()


def page_of(capsys: pytest.CaptureFixture[str], job: str) -> str:
    """The page of that job, from the store."""
    return told(capsys, "report", job, "--output", "-")[0]


def test_end_to_end_metrics_are_those_of_one_process(store: SqlStore, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Attempt 1 saved at 20 and died at 38; attempt 2 did 20 to 30 in 5.4 s and saved nothing. Then attempt 3 tells nothing."""

    def ends(attempt: int, iteration: int, second: float, **values: float) -> MetricsSaved:
        series = {name: [MetricBin.of(iteration, at(second), 0, value)] for name, value in values.items()}
        return MetricsSaved(BIG, attempt, 0, "end_to_end", series)

    first = ends(
        *(1, 30, 10), app_wall_time=9.6, train_iterations=30, train_iterations_start=0, train_iterations_end=30, lost_time=1.5,
        train_iterations_time_total_productive=6.4, save_checkpoint_sync_time_total=0.051, train_iterations_productive_end=20,
    )  # fmt: skip
    second = ends(
        *(2, 30, 20), app_wall_time=5.4, train_iterations=10, train_iterations_start=20, train_iterations_end=30, lost_time=0.8,
    )  # fmt: skip
    tries = [
        AttemptSaved(BIG, n, n, at(10 * n - 10), at(10 * n), at(10 * n - 8), 2, ["n"], "failed", "", start, last)
        for n, start, last in ((1, 0, 38), (2, 20, 30))
    ]
    store.commit([saved(BIG, "ended", attempt=2, iteration=30), *tries, first])
    assert "30 iterations done, 20 of them held by a durable checkpoint" in page_of(capsys, "big")
    store.commit([second])
    account = page_of(capsys, "big").partition("End-to-end metrics")[2].partition("</section>")[0]
    assert "10 iterations done from iteration 20 on" in account and "durable" not in account and "saves" not in account
    took = re.findall(r'<td class="n">([\d.]+ s)</td>', account)
    assert took == ["0.8 s", "4.6 s", "5.4 s"] and ">of the newest process or entry, as its rank 0 told" in account
    store.commit([AttemptSaved(BIG, 3, 3, at(30), None, None, 2, ["n"], start_iteration=20)])
    assert ">of the newest process or entry that told any, as its rank 0 told" in page_of(capsys, "big")


def test_an_iteration_of_the_summary_has_no_evaluations_in_it(
    store: SqlStore, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It steps for 80 s and does 80 iterations, which took half a second each; 10 of them are at risk."""
    records = [
        saved(BIG, "ended", iteration=80, exit_code=1),
        AttemptSaved(BIG, 1, 1, at(-20), at(60), at(-20), 2, ["n"], "failed", "", 0, 80),
        CheckpointSaved(BIG, 1, 70, "/c/70", at(50)),
    ]
    store.commit(records)
    assert "<dt>mean time of an iteration</dt><dd>750 ms<" in page_of(capsys, "big"), "nobody told it"
    curve = {40: 0.4, 60: 0.5, 80: 0.6}
    series = {"iteration-time": bins(curve), "lm loss": bins({80: 3.0})}
    store.commit([MetricsSaved(BIG, 1, 0, kind, series) for kind in ("training", "timers")])
    content = page_of(capsys, "big")
    assert "<dt>mean time of an iteration</dt><dd>500 ms<" in content
    assert "10 iterations since iteration 70 (about 5.0 s of work)" in content


def colours(page: str) -> dict[str, set[str]]:
    """The names that the page's keys give to each colour of stretches of time, without what is behind a comma."""
    found: dict[str, set[str]] = {}
    for style, name in re.findall(r'<i class="key (part-[\w-]+|slow)"></i>([^<,:]*)', page):
        found.setdefault(style, set()).add(name)
    return found


def test_a_colour_means_the_same_wherever_time_is_shown(
    story: SqlStore, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ("app_wall_time", "train_iterations_time_total_productive", "lost_time", "validation_iterations_time_total")
    names += ("save_checkpoint_sync_time_total", "load_checkpoint_time")
    series = {name: bins({60: 60.0 if name == "app_wall_time" else 5.0}) for name in names}
    story.commit([MetricsSaved(T1, 2, 0, "end_to_end", series)])
    page = page_of(capsys, "t1")
    keys = colours(page)
    assert {style: len(meanings) for style, meanings in keys.items()} == dict.fromkeys(keys, 1), keys
    assert {
        "part-waiting",
        "part-restart",
        "part-rerun",
        "part-evaluation",
        "part-load",
        "part-unsaved",
        "part-lost",
    } <= keys.keys()
    drawn = set(re.findall(r'<rect class="([\w-]+)"', page))
    assert drawn == set(keys), "each stretch has a key, and each key a stretch"
    for scheme in re.findall(r":root \{(.*?)\}", page, re.DOTALL):
        variables = dict(re.findall(r"(--[\w-]+): (#\w+)", scheme))
        rules = re.findall(r"\.(part-[\w-]+|slow) \{ fill: (?:var\((--[\w-]+)\)|(#\w+));", page)
        filled = {style: variables.get(variable, plain) for style, variable, plain in rules}
        assert set(keys) <= filled.keys() and len(set(filled.values())) == len(filled) and all(filled.values()), filled


def test_the_time_line_shows_a_restart_as_long_as_it_took(
    story: SqlStore, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """From the fault at 26 s to the stop at 27 s, and from 27.2 s to the first step at 28 s, of 60 s."""
    lanes = page_of(capsys, "t1").partition('<svg viewBox="0 0 2000 20"')[2].partition("</svg>")[0]
    assert 'aria-label="attempts"' in lanes
    stretches = re.findall(r'<rect class="part-([\w-]+)" x="(\d+)" width="(\d+)"', lanes)
    assert [(style, round(int(x) * 60 / 2000, 1)) for style, x, _ in stretches] == [
        *(("waiting", 0.0), ("waiting", 27.0)),
        *(("startup", 1.0), ("productive", 2.0), ("lost", 21.2), ("restart", 26.0), ("restart", 27.2), ("productive", 28.0)),
    ]
    took_s = sum(int(width) for style, _, width in stretches if style == "restart") * 60 / 2000
    assert took_s == pytest.approx(1.8, abs=0.05)


def test_a_supervisor_and_the_store_give_the_same_page(
    store: SqlStore,
    serve: Callable[[], Served],
    here: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store.commit(big())
    monkeypatch.setattr(report_sources, "MAX_EVENT_PAGES", 1)
    from_store, err = told(capsys, "report", "big", "--output", "-")
    assert "reading the store" in err
    served = serve()
    token = here / "token"
    token.write_text(TOKENS["operator"])
    token.chmod(0o600)
    monkeypatch.setenv("RSUP_TOKEN_FILE", str(token))
    from_supervisor, err = told(capsys, "report", "big", "--output", "-", "--supervisor", served.address)
    assert not err

    def timeless(page: str) -> str:
        return re.sub(r"made by rsup .*", "", page)

    assert timeless(from_supervisor) == timeless(from_store)
    assert len(from_store.encode()) < 2**20
    for part in (
        "the newest 100 of 200 incidents",
        "64 of 1000",
        "rank 3<",
        "as its rank 0 told, last at 2025-11-29T21:00:00Z after iteration 9: what came later is not in it",
        "GiB",
        "3 more are not drawn",
        "the newest 300 of 2499",
        "<td>event 2499</td>",
    ):
        assert part in from_store, part


def measured(pages: dict[str, str], folder: Path) -> tuple[dict[str, Any], str, str]:
    """Open the pages in frames of 400 and 1400 pixels. What was measured in these by name and width; what the browser printed;
    its log of requests."""
    frames = "".join(
        f'<iframe data-name="{name} {width}" style="width:{width}px" srcdoc="{html.escape(page)}"></iframe>'
        for name, page in pages.items()
        for width in (400, 1400)
    )
    outer = folder / "outer.html"
    style = "<style>iframe { border: 0; height: 900px }</style>"
    outer.write_text(f'<!doctype html><meta charset="utf-8">{style}<body>{frames}<script>{_SCRIPT}</script>', "utf-8")
    log = folder / "net.json"
    flags = (*FLAGS, f"--user-data-dir={folder}/profile", "--enable-logging=stderr", "--virtual-time-budget=3000")
    nowhere = "--host-resolver-rules=MAP *.invalid ~NOTFOUND"
    done = subprocess.run(
        [str(CHROMIUM), *flags, nowhere, f"--log-net-log={log}", outer.as_uri()],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    found = re.search(r'<pre id="found">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found, done.stdout[-2000:]
    return json.loads(html.unescape(found.group(1))), done.stderr, log.read_text()


_SCRIPT = """
new Image().src = "http://canary.invalid/x";
const meet = (from, to, start, end) => from < end - 1 && start < to - 1;
const overlaps = (a, b) => meet(a.left, a.right, b.left, b.right) && meet(a.top, a.bottom, b.top, b.bottom);
addEventListener("load", () => {
  const found = {};
  for (const frame of document.querySelectorAll("iframe")) {
    const page = frame.contentDocument, root = page.documentElement;
    const crossing = [];
    for (const group of page.querySelectorAll(".xs, .ys, .track")) {
      const boxes = [...group.querySelectorAll("span, b")].map((node) => [node.textContent, node.getBoundingClientRect()]);
      boxes.forEach(([text, box], place) => boxes.slice(place + 1).forEach(([more, other]) => {
        if (overlaps(box, other)) crossing.push(`${text} / ${more}`);
      }));
    }
    const left = (node) => node.getBoundingClientRect().left;
    const cut = [...page.querySelectorAll(".plot .ys span")].filter((node) => left(node) < left(node.closest("figure")));
    const plots = [...page.querySelectorAll(".plot svg")].map((node) => node.getBoundingClientRect());
    found[frame.dataset.name] = {
      wider: root.scrollWidth - root.clientWidth, crossing, cut: cut.map((node) => node.textContent), title: page.title,
      plots: plots.length, flat: plots.filter((box) => box.width < 150 || box.height < 100).length,
      images: page.images.length, scripts: page.scripts.length, bold: page.querySelectorAll("[onclick]").length,
      heading: page.querySelector("h1").firstChild.data,
    };
  }
  const shown = document.createElement("pre");
  shown.id = "found";
  shown.textContent = JSON.stringify(found);
  document.body.append(shown);
});
"""


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium here")
def test_in_a_browser(story: SqlStore, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing leaves, nothing runs, nothing overlaps, at the width of a telephone and of a screen."""
    story.commit([*hostile(), *big()])
    pages = {}
    for name, job in (("hostile", f"bob/{HOSTILE.job_id}"), ("big", "big"), ("plain", "t1")):
        told(capsys, "report", job, "--output", f"{name}.html")
        pages[name] = (here / f"{name}.html").read_text("utf-8")
    found, printed, asked = measured(pages, here)
    assert len(found) == 6
    for name, one in found.items():
        assert not one["crossing"] and not one["cut"] and not one["flat"] and one["wider"] <= 0, (name, one)
        assert one["images"] == one["scripts"] == one["bold"] == 0, name
    assert found["hostile 400"]["title"] == f"{HOSTILE}: rsup report"
    assert found["hostile 400"]["heading"].strip() == str(HOSTILE)
    assert found["hostile 1400"]["plots"] == 10 and found["plain 400"]["plots"] == 0
    said = [line for line in printed.splitlines() if "CONSOLE" in line and "canary" not in line]
    assert not said and "canary.invalid" in asked and "hostile.invalid" not in asked


def test_the_bar_of_a_status_is_plain_where_the_terminal_is(story: SqlStore, here: Path) -> None:
    """A locale without block characters, and a job whose name it lacks."""
    done = subprocess.run(
        [sys.executable, "-m", "rsup.launcher", "status", "t1"],
        capture_output=True,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        timeout=60,
        check=True,
    )
    shown = done.stdout.decode("ascii")
    assert re.search(r"^[#%+.]*#{30,}[#%+.]*$", shown, re.MULTILINE) and "# training that was kept" in shown
