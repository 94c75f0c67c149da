"""The page of `rsup report`: one HTML file that needs nothing else, from what `report_sources` gathers. Pure.

It has no script, and its policy forbids every request, so that it can be sent around and opened anywhere.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rsup.supervisor.render import clean
from rsup.supervisor.report_curves import curve_sections, marks_of
from rsup.supervisor.report_markup import text
from rsup.supervisor.report_story import (
    cases_section,
    checkpoints_section,
    devices_section,
    events_section,
    incidents_section,
    stragglers_section,
    summary,
)
from rsup.supervisor.report_timeline import timeline_section
from rsup.supervisor.report_times import time_section
from rsup.supervisor.wire import RELEASE

Json = Mapping[str, Any]

STYLE = Path(__file__).resolve().parent / "web" / "report.css"
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"


@dataclass(frozen=True)
class ReportData:
    """`status`: `views.job_status`. `series`: by kind and name as in `metric_views.series_of`; why there are none is said where
    the job has them. `devices`: `hardware_views.device_detail` by UUID, of those that are worth it."""

    status: Json
    series: Mapping[str, Mapping[str, Json]] = field(default_factory=dict)
    events: Sequence[Json] = ()
    devices: Mapping[str, Json] = field(default_factory=dict)
    why_no_series: str = ""


def report_page(data: ReportData, made: str) -> str:
    """The whole file. `made`: when, for people."""
    status = data.status
    name = text(status["job"]["name"])
    parts = [
        summary(status),
        timeline_section(status, data.events),
        time_section(status),
        curve_sections(data.series, marks_of(status), data.why_no_series),
        incidents_section(status),
        cases_section(status),
        stragglers_section(status),
        devices_section(status, data.devices),
        checkpoints_section(status),
        events_section(data.events),
    ]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        '<meta name="referrer" content="no-referrer">\n'
        f"<title>{name}: rsup report</title>\n"
        f'<link rel="icon" href="data:,">\n<style>\n{STYLE.read_text()}</style>\n</head>\n<body>\n<main>\n'
        f"{''.join(parts)}</main>\n<footer>made by rsup {RELEASE} at {text(made)}; times are UTC</footer>\n</body>\n</html>\n"
    )


def file_name(job_name: str) -> str:
    """`rsup-report-NAME.html`; what has no place in the name of a file is an underscore."""
    kept = "".join(one if one.isascii() and (one.isalnum() or one in "._-") else "_" for one in clean(job_name))
    return f"rsup-report-{kept[:100]}.html"
