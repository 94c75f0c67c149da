"""Units, sudoers, container file and the operator's page name what exists, and grant no more than what is used."""

import contextlib
import io
import re
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from rsup.launcher import cli
from rsup.supervisor.slurm.scheduler import Scontrol

ROOT = Path(__file__).parents[2]
SYSTEMD, SUDOERS = ROOT / "deploy" / "systemd", ROOT / "deploy" / "slurm" / "rsup.sudoers"
MAX_EXPOSURE = 50  # tenths; systemd calls 5.0 and less OK

# --------------------------------------------------------------------------------------------------------------- units


def unit(name: str) -> dict[str, list[str]]:
    """Values of a unit file by key, in order."""
    found: dict[str, list[str]] = {}
    for line in (SYSTEMD / name).read_text().splitlines():
        if "=" in line and not line.startswith("#"):
            key, _, value = line.partition("=")
            found.setdefault(key, []).append(value)
    return found


def test_the_supervisor_runs_as_nobody_special_with_room_for_all_agents() -> None:
    serve = unit("rsup.service")
    assert serve["User"] == ["rsup"] and serve["NoNewPrivileges"] == ["yes"] and serve["CapabilityBoundingSet"] == [""]
    assert int(serve["LimitNOFILE"][0]) >= 4 * 2048  # a connection each, twice while they reconnect, and REST
    environment = dict(word.split("=", 1) for word in serve["Environment"][0].split())
    assert environment["RSUP_STATE_DIR"] == f"/var/lib/{serve['StateDirectory'][0]}"
    node = unit("rsup-healthcheck.service")
    assert serve["RuntimeDirectory"] != node["RuntimeDirectory"]  # the end of one must not remove the other's files
    assert node["RuntimeDirectoryPreserve"] == ["yes"]
    for found in (serve, node):
        words = found["ExecStart"][0].split()
        assert words[0] == "/opt/rsup/bin/rsup" and help_of(words[1:])
    # The drop-in for sudo takes back everything that forbids it.
    assert set(unit("rsup-sudo.conf")) <= set(serve)


def test_one_node_has_none_to_spare(tmp_path: Path) -> None:
    script = ROOT / "deploy" / "slurm" / "spare_nodes.sbatch"
    environment = {"SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NAME": "t", "SLURM_JOB_ID": "1", "PATH": "/usr/bin:/bin"}
    done = subprocess.run(["bash", str(script)], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=20)
    assert (done.returncode, done.stderr) == (2, "1 nodes and 1 of them spare leave none: ask for more with sbatch --nodes\n")


def test_systemd_takes_the_units(tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("systemd-analyze is not installed")
    units = [shutil.copy(path, tmp_path) for path in SYSTEMD.iterdir()]
    services = [Path(path) for path in units if str(path).endswith(".service")]
    for path in services:
        path.write_text(path.read_text().replace("/opt/rsup/bin/rsup", "/bin/true"))
    (tmp_path / "rsup.service.d").mkdir()
    timer = tmp_path / "rsup-healthcheck.timer"
    for _ in range(2):  # the second time with the drop-in
        done = subprocess.run([analyze, "verify", "--man=no", *services, timer], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0 and str(tmp_path) not in done.stderr, done.stderr
        shutil.copy(tmp_path / "rsup-sudo.conf", tmp_path / "rsup.service.d" / "sudo.conf")
    for path in (SYSTEMD / "rsup.service", SYSTEMD / "rsup-healthcheck.service"):
        command = [analyze, "security", "--offline=true", f"--threshold={MAX_EXPOSURE}", str(path)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, [*done.stdout.splitlines()[-1:], done.stderr]


# ------------------------------------------------------------------------------------------------------------- sudoers


def granted(words: str) -> bool:
    """Whether sudo would run scontrol with these words."""
    text = SUDOERS.read_text()
    patterns = [found.replace("\\,", ",") for found in re.findall(r"/usr/bin/scontrol (\^.*?\$)(?:, \\)?\n", text)]
    assert len(patterns) == text.count("/usr/bin/scontrol ^")
    return any(re.fullmatch(pattern, words) for pattern in patterns)


def test_sudo_grants_what_the_supervisor_asks_for_and_nothing_else(tmp_path: Path) -> None:
    if visudo := shutil.which("visudo", path="/usr/sbin:/usr/bin"):
        subprocess.run([visudo, "-cf", SUDOERS], check=True, capture_output=True, timeout=30)
    asked = tmp_path / "asked"
    recorder = tmp_path / "scontrol"
    recorder.write_text(f'#!/bin/sh\necho "$*" >> {asked}\n[ "$2" != config ] || echo "ClusterName = c"\n')
    recorder.chmod(0o755)
    scontrol = Scontrol(str(recorder))
    names = [*(f"n{i}" for i in range(1, 5)), "n7", "r12-n03", "login.a_b"]
    scontrol.nodes()
    scontrol.nodes(names)
    scontrol.cluster_name()
    scontrol.drain(names, "rsup:Q-17 GPU 3 serial 165.. SDC vote 3/3 jobs; until repaired; rsup nodes why n1")
    scontrol.explain(names, "rsup:Q-17 GPU 3 serial 165.. Xid 79 (+1); rsup nodes why n1")
    scontrol.undrain(names)
    scontrol.weigh("n1", 1000)
    scontrol.reserve("n1")
    scontrol.reservations()
    scontrol.unreserve("n1")
    lines = asked.read_text().splitlines()
    assert len(lines) == 10
    for line in lines:
        assert granted(line), line
    for line in (
        "update nodename=n1 state=down reason=rsup:x",
        "update nodename=n1 state=drain reason=an admin's",
        "update nodename=n1 state=drain reason=rsup:x partition=main",
        "update nodename=n1 state=resume",
        "update nodename=n1 reason=an admin's",
        "update nodename=n1 reason=rsup:x state=down",
        "update jobid=7 requeue=0",
        "delete reservationname=maintenance",
        "shutdown",
        "reconfigure",
    ):
        assert not granted(line), line
    kept = re.findall(r'^Defaults.* env_keep \+= "(.*?)"', SUDOERS.read_text(), re.MULTILINE)
    assert kept == ["SLURM_TIME_FORMAT LC_ALL"], "SLURM_CONF names plugins that root would load"


# ----------------------------------------------------------------------------------------------------------- container


def test_the_container_file_copies_what_the_wheel_needs_and_ends_without_root() -> None:
    lines = (ROOT / "deploy" / "container" / "Containerfile").read_text().replace("\\\n", " ").splitlines()
    copied = [word for line in lines if re.match(r"COPY (?!--from)", line) for word in line.split()[1:-1]]
    assert all((ROOT / word).exists() for word in copied)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert {*wheel["packages"], project["project"]["readme"], "pyproject.toml", "hatch_build.py"} <= set(copied)
    users = [line.split()[1] for line in lines if line.startswith("USER ")]
    assert users and not users[-1].startswith(("0", "root"))
    assert lines[-1] == 'CMD ["serve"]'


# ---------------------------------------------------------------------------------------------------- the operator's page


def help_of(words: list[str]) -> str:
    """What `rsup WORDS --help` prints, for the longest beginning of `words` that is a verb."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        cli.main([*words, "--help"])
    return printed.getvalue()


def commands() -> list[list[str]]:
    """Every `rsup ...` of the page: lines of code blocks, and inline."""
    text = (ROOT / "docs" / "operating.md").read_text()
    blocks = "\n".join(block for kind, block in re.findall(r"```(\w*)\n(.*?)```", text, re.S) if not kind)
    spoken = re.sub(r"```.*?```", "", text, flags=re.S)
    verb = f"(?:{'|'.join(cli.VERBS)})"
    lines = re.findall(rf"\brsup ({verb} .*)", blocks) + re.findall(rf"`rsup ({verb} [^`]*)`", spoken)
    return [shlex.split(line, comments=True) for line in lines]


def test_every_command_of_the_page_exists() -> None:
    assert len(commands()) > 15
    for words in commands():
        verbs = words[: 2 if words[0] in ("slurm", "db", "nodes", "devices") else 1]
        shown = help_of(verbs)
        assert shown, words
        for option in (word.partition("=")[0] for word in words if word.startswith("--")):
            assert option in shown, f"rsup {' '.join(verbs)} has no {option}"
