"""Lists of nodes for people."""

from typing import Any

from rsup.supervisor.hardware.hardware_text import list_text


def node(job: dict[str, Any] | None) -> dict[str, Any]:
    standing = {"state": "clear", "override": None, "score": 0.0, "reason": "", "evidence": {"known": 0, "counted": 0}}
    return {"node": "n1", "role": "active", "job": job, "devices": ["a", "b"], **standing}


def test_a_node_has_a_role_only_while_its_job_runs() -> None:
    headings, *rows = list_text(
        "node", [node({"name": "a", "state": "running"}), node({"name": "a", "state": "ended"}), node(None)]
    ).splitlines()
    role, job, devices = (headings.index(name) for name in ("ROLE", "JOB", "DEVICES"))
    assert [(row[role:job].strip(), row[job:devices].strip()) for row in rows] == [
        ("active", "a"), ("-", "a (ended)"), ("active", "-"),
    ]  # fmt: skip
