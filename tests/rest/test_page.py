"""The status page in a real browser: it shows the ranks, and text of jobs stays text."""

import re
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlencode

import pytest

from rsup.supervisor.sql_store import SqlStore
from tests.rest.played import TOKENS, PlayedSupervisor, Served
from tests.rest.story import EVIL, RUNNING

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--dump-dom"),
)
pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="no chromium here")]


def dom_of(address: str, folder: Path, *flags: str) -> str:
    """The page's document after its scripts have run for a while."""
    command = [str(CHROMIUM), *FLAGS, f"--user-data-dir={folder}/profile", *flags, address]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


def part(dom: str, identity: str) -> str:
    """What stands in the document from the element with that id up to the next section."""
    return dom.split(f'id="{identity}"', 1)[1].split("</section>", 1)[0]


def signed_in(served: Served, **place: str) -> str:
    """The page's address with the operator's token, at that job."""
    return f"{served.address}/?token={TOKENS['operator']}" + (f"#{urlencode(place)}" if place else "")


def test_the_job_page_shows_ranks_and_keeps_markup_text(served: Served, own_directories: Path) -> None:
    dom = dom_of(signed_in(served, job=EVIL, owner="bob"), own_directories, "--virtual-time-budget=4000")
    rows = re.findall(r"<tr.*?</tr>", part(dom, "ranks"))
    assert len(rows) == 2 and "n2" in rows[1] and "step 2.5 s" in rows[1] and "1.1 s" in rows[1]
    assert "Looks stuck" in part(dom, "suspects") and "suspected-hang" in part(dom, "incidents")
    (case,) = re.findall(r"<tr.*?</tr>", part(dom, "cases"))
    assert "open" in case and "CPU" in case and re.search(r'<td class="why">.*rank 1 on .*: nan, nan again in place', case)
    assert "<script>document" not in dom and "<title>taken" not in dom
    assert dom.count("&lt;script&gt;document.title") >= 4  # name, reason of the incident, event, command


def test_the_list_shows_all_jobs(served: Served, own_directories: Path) -> None:
    dom = dom_of(signed_in(served), own_directories, "--virtual-time-budget=4000")
    assert dom.count('class="job"') == 5 and "t1.2" in dom and "<script>document" not in dom
    assert TOKENS["operator"] not in dom


def test_without_a_token_it_says_how_to_sign_in(served: Served, own_directories: Path) -> None:
    dom = dom_of(served.address, own_directories, "--virtual-time-budget=4000")
    assert "Not signed in" in part(dom, "notice")


def test_an_empty_store_is_friendly(store: SqlStore, serve: Callable[[], Served], own_directories: Path) -> None:
    dom = dom_of(signed_in(serve()), own_directories, "--virtual-time-budget=4000")
    assert re.search(r'<p id="no-jobs" class="empty">No jobs yet', dom) and "live" in part(dom, "link")


def refuses(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


def test_a_supervisor_that_goes_away_leaves_the_last_picture(
    served: Served, own_directories: Path, played: PlayedSupervisor
) -> None:
    beats, calls, port = played.live_beats[RUNNING], 0, int(served.address.rpartition(":")[2])
    leaver = threading.Thread(target=served.stop)

    def beats_until_gone(job: object) -> object:
        nonlocal calls
        calls += 1
        if calls == 3:  # the page's time stands still until this is answered, and then nobody is there any more
            leaver.start()
            deadline = time.monotonic() + 30
            while not refuses(port) and time.monotonic() < deadline:
                time.sleep(0.01)
        return beats

    played.beats = beats_until_gone  # type: ignore[method-assign, assignment]
    dom = dom_of(signed_in(served, job=EVIL, owner="bob"), own_directories, "--virtual-time-budget=20000")
    leaver.join(timeout=30)
    assert "no answer since 20" in part(dom, "link") and "rsup status" in part(dom, "notice")
    assert len(re.findall(r"<tr>|<tr ", part(dom, "ranks"))) == 2
