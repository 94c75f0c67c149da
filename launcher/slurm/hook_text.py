"""The scripts that SLURM runs on a node, as `rsup slurm install` writes them. `deploy/slurm/` has them for `/opt/rsup`.

SLURM drains a node for every exit but 0 of a prolog or an epilog: for a missing interpreter too. So these let in what is not a
plain refusal: exit code 1 together with a line that begins with `rsup:`. A traceback ends with 1 as well, but prints no such
line. They give up after 7 s even where the interpreter cannot be killed (`read -t`), and leave nobody behind who holds SLURM's
pipes.
"""

DEFAULT_PYTHON = "/opt/rsup/bin/python"
HOOKS = ("prolog", "epilog", "healthcheck")

_HEAD = """\
#!/bin/bash
# rsup's @NAME@ for SLURM, written by `rsup slurm install`. Node settings: /etc/rsup/node.toml. What went wrong: LOG below.
# SLURM gives neither PATH nor HOME nor a language; what Python would take from the environment is shut out by -I.
PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/ LC_ALL=C.UTF-8
export PATH HOME LC_ALL
PYTHON=@PYTHON@
LOG="${RSUP_NODE_ROOT}/var/log/rsup/hooks.log"
cd /

log() { # one line; a log that grows too long is put aside once, and one that cannot be written is no reason to fail
  { mkdir -p "${LOG%/*}"
    [ "$(stat -c %s "$LOG" || echo 0)" -lt 4194304 ] || mv -f "$LOG" "$LOG.1"
    printf '%(%Y-%m-%dT%H:%M:%S%z)T @NAME@ node=%s job=%s: %s\\n' -1 "$SLURMD_NODENAME" "$SLURM_JOB_ID" "$1" >>"$LOG"
  } </dev/null >/dev/null 2>&1
}
"""

_PROLOG = """
answer= code=none said= errors=
while IFS= read -r -t 7 line; do
  case $line in
    'rsup:'*) answer=$line ;;
    'rsup-refused') said=1 ;; # it stands, whatever becomes of the notes that are kept afterwards
    'rsup-exit '*) code=${line#rsup-exit }; break ;; # whoever still holds the pipe is not waited for
    *) errors=$line ;; # the last line of a traceback
  esac
done < <(exec </dev/null 2>&1; timeout -k 1 5 "$PYTHON" -I -m rsup.launcher.slurm.prolog; echo "rsup-exit $?")

case ${said:-$code}:$answer in
  1:rsup:*)
    log "refused: $answer"
    echo "$answer" # SLURM writes it into slurmd's log
    exit 1 ;;
  75:*|0:rsup:unknown*) log "let in, undecided: $answer" ;;
  0:rsup:observe*|0:rsup:cap*) log "let in: $answer" ;; # what mode observe would refuse, and what was refused often enough
  0:*) ;;
  *) log "let in, the gate failed: exit $code ${errors:-of $PYTHON}" ;;
esac
exit 0
"""

_EPILOG = """
code=none errors=
while IFS= read -r -t @WAIT@ line; do
  case $line in
    'rsup-exit '*) code=${line#rsup-exit }; break ;; # whoever still holds the pipe is not waited for
    *) errors=$line ;;
  esac
done < <(exec </dev/null 2>&1; timeout -k 1 @BOX@ "$PYTHON" -I -m rsup.launcher.slurm.@NAME@; echo "rsup-exit $?")
[ "$code" = 0 ] || log "exit $code ${errors:-of $PYTHON}"
exit 0
"""
_BOXES = {"epilog": ("5", "7"), "healthcheck": ("40", "45")}


def hook_text(name: str, python: str = DEFAULT_PYTHON) -> str:
    """The script of one of `HOOKS`, which starts the interpreter `python`."""
    body = _PROLOG
    if name != "prolog":
        box, wait = _BOXES[name]
        body = _EPILOG.replace("@BOX@", box).replace("@WAIT@", wait)
    return (_HEAD + body).replace("@NAME@", name).replace("@PYTHON@", _quoted(python))


def _quoted(text: str) -> str:
    import shlex

    return shlex.quote(text)
