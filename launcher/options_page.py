"""Help text and reference page of `rsup launch`, both made from the option tables.

`python -m rsup.launcher.options_page > docs/options.md` writes the page; a test holds it equal to the tables.
"""

import textwrap

from rsup.launcher.launch_parser import ALL_OPTIONS
from rsup.launcher.option_table import HANG_LIMITS, NO_EFFECT, OURS, TORCHRUN, Option

GROUPS = (TORCHRUN, OURS, HANG_LIMITS, NO_EFFECT)

_INTRODUCTION = """\
<!-- Made by `python -m rsup.launcher.options_page`; do not edit. -->
# Options of `rsup launch`

`rsup launch [OPTIONS] SCRIPT [ARGUMENTS]`. Options end where the script begins: what stands right of it is the script's,
verbatim. A `--` before the script is dropped. Every long option may be written with `-` or `_`, as `--option VALUE` or
`--option=VALUE`, and abbreviated as far as it stays unambiguous; an abbreviation that torchrun takes means the same here.

The command line wins over the environment, the environment over the YAML file of `--ft-cfg-path`, that over the default.
Switches take no value; in the environment they are `1`, `0`, `true` or `false`. An empty variable counts as unset.
"""

_ENDING = """\
## Environment

| variable | meaning |
|---|---|
| `PYTHON_EXEC` | Interpreter of the ranks instead of the launcher's own. |
| `OMP_NUM_THREADS` | Threads of each rank. Unset: 1, where a node has several. `auto`: an equal share of the node's cores. |
| `TORCHELASTIC_ERROR_FILE` | Of the launcher: receives the first failing rank's error file, or why the launch was refused. |
| `TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE` | Prefix of `--tee` lines, with `${role_name}`, `${rank}`, `${local_rank}`. |
| `TORCHELASTIC_ENABLE_FILE_TIMER` | `1`: serve torch's file timers, at `TORCHELASTIC_TIMER_FILE` if that is set. |
| `TORCHELASTIC_HEALTH_CHECK_PORT` | Without effect: the supervisor answers over REST. |
| `LOGLEVEL` | Goes to the ranks; what the launcher says does not depend on it. |
| `TORCH_ELASTIC_SHUTDOWN_TIMEOUT` | Default of `--shutdown-timeout`. |
| `XDG_RUNTIME_DIR` | Sockets, spools, heartbeat boards: in `rsup` below it; else in `/tmp/rsup-UID`, or one beside it. |
| `CUDA_VISIBLE_DEVICES` | GPUs that `--nproc-per-node gpu` counts, and that the ranks see. |
| `SLURM_JOB_ID` | Default of `--job-id`; a second launch beside the first gets a generated one. |
| `SLURM_STEP_*` | In a step (`srun rsup launch`, one task a node) they tell nodes, place and meeting point. |
| `SLURMD_NODENAME` | This node's name, in a SLURM job. |
| `RSUP_PORT_RANGE` | `LOW-HIGH`: where the first node of a SLURM step answers the others; 10000-29999. |
| `RSUP_NODE_ROOT` | Before the paths of the node's gate (`/run/rsup`, `/etc/rsup`), for tests. |
| `SLURM_RESTART_COUNT` | More than 0: as `--resume`. |
"""


def page() -> str:
    """The reference page as Markdown."""
    parts = [_INTRODUCTION]
    for group in GROUPS:
        rows = [_row(option) for option in ALL_OPTIONS if option.group == group]
        parts.append(
            "\n".join([f"## {group}", "", "| option | environment | default | meaning |", "|---|---|---|---|", *rows, ""])
        )
    return "\n".join([*parts, _ENDING])


def _row(option: Option) -> str:
    flags = ", ".join(f"`{flag}`" for flag in option.flags)
    env = f"`{option.env}`" if option.env else ""
    return " | ".join(["| " + flags, env, _shown_default(option), option.meaning.replace("|", "\\|") + " |"])


def _shown_default(option: Option) -> str:
    if option.shown_default:
        return option.shown_default
    if option.is_switch:
        return "off"
    return f"`{option.default}`" if option.default else ""


def help_text() -> str:
    """What `rsup launch --help` prints."""
    lines = ["usage: rsup launch [OPTIONS] SCRIPT [ARGUMENTS]", ""]
    lines += textwrap.wrap("Run a training script in one process a rank, as torchrun does, and keep the job alive.", 100)
    for group in GROUPS[:-1]:
        lines += ["", f"{group}:"]
        for option in ALL_OPTIONS:
            if option.group == group:
                lines += _help_lines(option)
    names = " ".join(option.flag for option in ALL_OPTIONS if option.group == NO_EFFECT)
    lines += [
        "",
        f"{NO_EFFECT}:",
        *textwrap.wrap(names, 100, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False),
    ]
    return "\n".join([*lines, ""])


def _help_lines(option: Option) -> list[str]:
    choices = "{" + ",".join(option.choices) + "}" if option.choices else "VALUE"
    names = ", ".join(sorted(option.flags, key=len)) + ("" if option.is_switch else f" {choices}")
    default = _shown_default(option)
    meaning = option.meaning + (f" Default: {default}." if default and default != "off" else "")
    return [f"  {names}", *textwrap.wrap(meaning.replace("`", ""), 94, initial_indent=" " * 6, subsequent_indent=" " * 6)]


if __name__ == "__main__":
    print(page(), end="")
