"""What `rsup slurm install` says of a slurm.conf."""

from pathlib import Path

import pytest

from rsup.launcher.slurm.slurm_conf import ADVICE, OFF, UNSAFE, check_conf, check_files, parse_conf, read_conf

HOOKS = {name: f"/usr/libexec/rsup/{name}" for name in ("prolog", "epilog", "healthcheck")}
SOUND = """\
Prolog=/usr/libexec/rsup/prolog
Epilog=/usr/libexec/rsup/epilog   # a comment
PrologEpilogTimeout=20
prologflags=Alloc,DeferBatch
SchedulerParameters=bf_interval=30,\\
  nohold_on_prolog_fail
HealthCheckProgram=/usr/libexec/rsup/healthcheck
HealthCheckInterval=60
HealthCheckNodeState=CYCLE,ANY
RequeueExit=1,88
GresTypes=gpu,nic
AuthInfo=cred_expire=30
NodeName=n[0-3] Gres=gpu:8
"""


def found(text: str) -> dict[str, str]:
    return {one.key: f"{one.level}: {one.text}" for one in check_conf(parse_conf(text), HOOKS)}


def test_the_shown_lines_are_sound() -> None:
    assert found(SOUND) == {}


@pytest.mark.parametrize(
    ("line", "key", "said"),
    [
        ("PrologEpilogTimeout=5", "PrologEpilogTimeout", "unsafe: is 5 s"),
        ("PrologEpilogTimeout=65534x", "PrologEpilogTimeout", "unsafe: is not set: SLURM waits for ever"),
        ("SchedulerParameters=bf_interval=30", "SchedulerParameters", "unsafe: lacks nohold_on_prolog_fail"),
        ("PrologFlags=", "PrologFlags", "unsafe: lacks Alloc"),
        ("PrologFlags=Contain", "PrologFlags", "advice: lacks DeferBatch"),
        ("PrologFlags=RunInJob", "PrologFlags", "advice: lacks DeferBatch"),  # 24.11; it implies Alloc
        ("ReturnToService=2", "ReturnToService", "advice: is 2"),
        (
            "Prolog=/etc/slurm/prolog.d/*",
            "Prolog",
            "unsafe: /etc/slurm/prolog.d/* is a pattern or a folder: SLURM runs the files of a pattern in reverse",
        ),
        ("PrologSlurmctld=/usr/libexec/rsup/prolog", "PrologSlurmctld", "unsafe: is no gate"),
        ("JobRequeue=0", "JobRequeue", "unsafe: is 0"),
        ("MessageTimeout=5", "MessageTimeout", "unsafe: is 5 s"),
        ("HealthCheckInterval=0", "HealthCheckInterval", "unsafe: is not set"),
        ("HealthCheckInterval=10", "HealthCheckInterval", "advice: is 10 s"),
        ("HealthCheckNodeState=ANY", "HealthCheckNodeState", "advice: lacks CYCLE"),
        ("GresTypes=nic", "GresTypes", "advice: has no gpu: SLURM gives hooks no SLURM_JOB_GPUS"),
        ("RequeueExit=1", "RequeueExit", "advice: lacks 88"),
        ("AuthInfo=socket=/run/munge", "AuthInfo", "advice: lacks cred_expire=30: a requeued job waits"),
    ],
)
def test_one_line_that_is_unsafe(line: str, key: str, said: str) -> None:
    words = found(SOUND + line + "\n")
    assert list(words) == [key] and words[key].startswith(said)


def test_an_empty_configuration_names_slurms_own_defaults() -> None:
    words = found("")
    unsafe = {key for key, text in words.items() if text.startswith(UNSAFE)}
    assert unsafe == {"PrologEpilogTimeout", "SchedulerParameters", "PrologFlags"}
    assert words["HealthCheckProgram"].startswith("advice: is not set: write HealthCheckProgram=/usr/libexec/rsup/healthcheck")
    assert words["Prolog"] == "off: is not set: nothing of rsup runs there; write Prolog=/usr/libexec/rsup/prolog"


def test_included_files_count_and_missing_ones_do_not_stop(tmp_path: Path) -> None:
    (tmp_path / "slurm.conf").write_text("Include more.conf\ninclude gone.conf\ninclude slurm.conf\n")
    (tmp_path / "more.conf").write_text(SOUND)
    conf = read_conf(tmp_path / "slurm.conf")
    assert conf["prolog"] == ("/usr/libexec/rsup/prolog",) * (len(conf["prolog"])) and check_conf(conf, HOOKS) == []


def test_a_hooks_file_that_drains_or_that_anybody_may_write(tmp_path: Path) -> None:
    hook = tmp_path / "prolog"
    conf = {"prolog": (f"{hook}, /etc/slurm/prolog.d/*",)}
    ours = HOOKS | {"prolog": str(hook)}
    assert "is not to be had on this node (No such file or directory): SLURM drains" in check_files(conf, ours)[0].text
    hook.write_text("#!/bin/sh\n")
    hook.chmod(0o644)
    assert "cannot be run" in check_files(conf, ours)[0].text
    hook.chmod(0o777)
    assert "can be written by others" in check_files(conf, ours)[0].text
    hook.chmod(0o755)
    assert check_files(conf, ours) == []
    missing = check_files({"healthcheckprogram": (str(tmp_path / "gone"),)}, HOOKS)
    assert missing[0].text.endswith("the healthcheck never runs"), "that drains nothing"


def test_a_hook_that_is_somebody_elses_is_no_gate(tmp_path: Path) -> None:
    """It is ours by its name, or by what it calls; one file in a folder is enough."""
    foreign, folder = tmp_path / "site", tmp_path / "epilogs"
    foreign.write_text("#!/bin/sh\nnhc\n")
    foreign.chmod(0o755)
    folder.mkdir()
    conf = {"prolog": (str(foreign),), "epilog": (str(folder),), "healthcheckprogram": (str(foreign),)}
    found = check_files(conf, HOOKS)
    assert [(one.level, one.key) for one in found] == [
        (OFF, "Prolog"),
        (UNSAFE, "Epilog"),
        (OFF, "Epilog"),
        (ADVICE, "HealthCheckProgram"),
    ]
    assert f"runs {foreign}, where rsup's prolog is not named" in found[0].text and "a folder" in found[1].text
    foreign.write_text("#!/bin/sh\n/usr/libexec/rsup/prolog || exit 1\nrsup slurm healthcheck\n")
    (folder / "90-rsup").write_text("exec /opt/rsup/bin/python -I -m rsup.launcher.slurm.epilog\n")
    assert [(one.level, one.key) for one in check_files(conf, HOOKS)] == [(UNSAFE, "Epilog")]
    assert found_with_whole_node(SOUND.replace("GresTypes=gpu,nic\n", "")) == []


def found_with_whole_node(text: str) -> list[str]:
    return [one.key for one in check_conf(parse_conf(text), HOOKS, whole_node=True)]
