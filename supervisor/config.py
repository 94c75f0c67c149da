"""Settings of the supervisor daemon: one table that makes its flags, its environment variables and its TOML file.

Order of precedence: flag, environment, file, default. The file is the one of `--config`, else `/etc/rsup/rsup.toml` for
`rsup serve`; its keys are the field names below. An embedded supervisor reads a file only if told to, since it is its user's.
"""

import argparse
import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from rsup.supervisor import places
from rsup.supervisor.one_line_parser import OneLineParser
from rsup.supervisor.wire import RELEASE, UsageError

SYSTEM_FILE = Path("/etc/rsup/rsup.toml")
SERVE_LISTEN = "127.0.0.1:8650"
EMBEDDED_LISTEN = "127.0.0.1:0"
EMBEDDED_IDLE_EXIT_S = 60.0


@dataclass(frozen=True)
class Option:
    """How a setting is spelled. `kind`: `text`, `switch`, `seconds` or `list` (commas, or repeat the flag)."""

    flag: str
    env: str
    kind: str
    metavar: str
    text: str


def _setting(default: object, flag: str, env: str, kind: str, metavar: str, text: str) -> Any:
    return field(default=default, metadata={"option": Option(flag, env, kind, metavar, text)})


CHOICES = {
    "drains": ("off", "propose", "act"),
    "drain_after": ("second", "one"),
    "quarantine_by": ("drain", "reservation"),
    "bad_gpu": ("drain", "refuse"),
}
"""Settings with few possible words."""
LEAST_S = {"drain_interval": 0.1}
"""Settings in seconds that would ask too much of others (of slurmctld) below that."""


@dataclass(frozen=True)
class Settings:
    """What a supervisor was started with."""

    state_dir: str = _setting(
        "", "--state-dir", "RSUP_STATE_DIR", "text", "DIR", "where store, token and supervisor.json are (~/.local/state/rsup)"
    )
    embedded: bool = _setting(False, "--embedded", "RSUP_EMBEDDED", "switch", "", "started by rsup launch: end when idle")
    rpc: tuple[str, ...] = _setting(
        (), "--rpc", "RSUP_RPC", "list", "ADDRESS", "answer agents at this ZeroMQ address, ipc:// or tcp:// (with a key)"
    )
    rpc_listen: tuple[str, ...] = _setting(
        (), "--rpc-listen", "RSUP_RPC_LISTEN", "list", "HOST:PORT", "answer agents of other hosts here (with a key)"
    )
    listen: str = _setting(
        "", "--listen", "RSUP_LISTEN", "text", "HOST:PORT", f"REST and web page (serve: {SERVE_LISTEN}; embedded: any port)"
    )
    database_url: str = _setting(
        "", "--database-url", "RSUP_DATABASE_URL", "text", "URL", "the store (SQLite in the state directory)"
    )
    key_file: str = _setting(
        "", "--key-file", "RSUP_KEY_FILE", "text", "FILE", "secret of the TCP link, mode 0600 (STATE_DIR/key)"
    )
    operators: tuple[str, ...] = _setting(
        (), "--operators", "RSUP_OPERATORS", "list", "USER|@GROUP", "serve: who may do everything, beside root and its own user"
    )
    socket_dir: str = _setting(
        "",
        "--socket-dir",
        "RSUP_SOCKET_DIR",
        "text",
        "DIR",
        f"serve: where this host's users connect, rest.sock and rpc.sock ({places.SYSTEM_SOCKET_DIR} under systemd)",
    )
    munge_socket: str = _setting(
        "", "--munge-socket", "RSUP_MUNGE_SOCKET", "text", "FILE", "socket of munged, where it is not at its usual place"
    )
    idle_exit: float | None = _setting(
        None, "--idle-exit", "RSUP_IDLE_EXIT", "seconds", "SECONDS", "embedded: end so long after the last job (60)"
    )
    device_policy: str = _setting(
        "", "--device-policy", "RSUP_DEVICE_POLICY", "text", "FILE", "TOML merged over the built-in rules for device evidence"
    )
    accept_injected: bool = _setting(
        False,
        "--accept-injected",
        "RSUP_ACCEPT_INJECTED",
        "switch",
        "",
        "let evidence of injected faults move states (always so when embedded)",
    )
    drains: str = _setting(
        "propose",
        "--drains",
        "RSUP_DRAINS",
        "text",
        "MODE",
        "serve: what is done in SLURM about quarantined nodes: off, propose (listed and counted), act",
    )
    drain_after: str = _setting(
        "second",
        "--drain-after",
        "RSUP_DRAIN_AFTER",
        "text",
        "WHEN",
        "drain for a verdict at its first episode (one), or at a second independent one (second)",
    )
    quarantine_by: str = _setting(
        "drain", "--quarantine-by", "RSUP_QUARANTINE_BY", "text", "HOW", "keep jobs off a node by a drain, or by a reservation"
    )
    bad_gpu: str = _setting(
        "drain",
        "--bad-gpu",
        "RSUP_BAD_GPU",
        "text",
        "HOW",
        "drain the node of a bad GPU, or (shared nodes) only refuse jobs that hold the GPU: drain, refuse",
    )
    avoid_suspects: bool = _setting(
        False,
        "--avoid-suspects",
        "RSUP_AVOID_SUSPECTS",
        "switch",
        "",
        "act: let SLURM take suspect nodes last, by their weight",
    )
    scontrol: str = _setting(
        "", "--scontrol", "RSUP_SCONTROL", "text", "COMMAND", "how to call scontrol, as `sudo -n /usr/bin/scontrol`"
    )
    drain_interval: float | None = _setting(
        None, "--drain-interval", "RSUP_DRAIN_INTERVAL", "seconds", "SECONDS", "look at SLURM at least so often (10)"
    )
    cluster: str = _setting(
        "", "--cluster", "RSUP_CLUSTER", "text", "NAME", "the cluster's name in snapshots (SLURM's ClusterName)"
    )
    signing_key_file: str = _setting(
        "",
        "--signing-key-file",
        "RSUP_SIGNING_KEY_FILE",
        "text",
        "FILE",
        "key that signs what gates read, mode 0600 (STATE_DIR/signing-key)",
    )
    debug: bool = _setting(False, "--debug", "RSUP_DEBUG", "switch", "", "debug lines and tracebacks")

    @property
    def state_path(self) -> Path:
        """The state directory, absolute."""
        return places.state_dir(self.state_dir or None)

    @property
    def rest_endpoint(self) -> str:
        """`host:port` of REST; port 0: any."""
        return self.listen or (EMBEDDED_LISTEN if self.embedded else SERVE_LISTEN)

    @property
    def idle_exit_s(self) -> float | None:
        """Seconds after which an idle supervisor ends, None: never."""
        if not self.embedded:
            return None
        return EMBEDDED_IDLE_EXIT_S if self.idle_exit is None else self.idle_exit


def option_of(name: str) -> Option:
    """The spelling of a field of `Settings`."""
    option = next(f for f in fields(Settings) if f.name == name).metadata["option"]
    assert isinstance(option, Option)
    return option


def load(arguments: Sequence[str], environment: Mapping[str, str] | None = None, program: str = "rsup serve") -> Settings:
    """Settings from flags, environment and file. Raise `UsageError` in one line for whatever is wrong with them."""
    environment = os.environ if environment is None else environment
    given = vars(_parser(program).parse_args(list(arguments)))
    config = given.pop("config")
    from_flags = {name: value for name, value in given.items() if value not in (None, [])}
    from_env = _from_environment(environment)
    embedded = bool(from_flags.get("embedded", from_env.get("embedded", False)))
    values = _from_file(Path(config) if config else None if embedded else SYSTEM_FILE, required=bool(config))
    values.update(from_env)
    values.update({name: _checked(name, value, option_of(name).flag) for name, value in from_flags.items()})
    return Settings(**values)


def from_file(path: Path) -> dict[str, Any]:
    """The settings that stand in a TOML file, by name. Raise `UsageError`."""
    return _from_file(path, required=True)


def _parser(program: str) -> argparse.ArgumentParser:
    parser = OneLineParser(prog=program, description="The supervisor of rsup jobs.", allow_abbrev=False)
    for setting in fields(Settings):
        option = option_of(setting.name)
        help_text = f"{option.text} [{option.env}]"
        if option.kind == "switch":
            parser.add_argument(option.flag, dest=setting.name, action="store_true", default=None, help=help_text)
        else:
            action = "append" if option.kind == "list" else "store"
            parser.add_argument(option.flag, dest=setting.name, action=action, metavar=option.metavar, help=help_text)
    parser.add_argument("--config", metavar="FILE", help=f"settings in TOML (serve: {SYSTEM_FILE} where it exists)")
    parser.add_argument("--version", action="version", version=f"rsup {RELEASE}")
    return parser


def _from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    values = {}
    for setting in fields(Settings):
        option = option_of(setting.name)
        text = environment.get(option.env, "")
        if text:
            values[setting.name] = _checked(setting.name, text, option.env)
    return values


def _from_file(path: Path | None, *, required: bool) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        content = tomllib.loads(path.read_text())
    except FileNotFoundError:
        if required:
            raise UsageError(f"there is no settings file {path}") from None
        return {}
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read the settings file {path}: {getattr(error, 'strerror', None) or error}") from None
    names = {setting.name for setting in fields(Settings)}
    for name in content:
        if name not in names:
            raise UsageError(f"{path}: unknown setting {name!r}; there are {', '.join(sorted(names))}")
    return {name: _checked(name, value, f"{path}: {name}") for name, value in content.items()}


def _checked(name: str, value: object, where: str) -> object:
    """`value` as the field holds it, or a `UsageError` that says where it stands."""
    kind = option_of(name).kind
    if kind == "switch":
        words = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
        switch = value if isinstance(value, bool) else words.get(str(value).lower())
        if switch is None:
            raise UsageError(f"{where}: {value!r} is neither true nor false")
        return switch
    if kind == "seconds":
        try:
            seconds = float(str(value))
        except ValueError:
            seconds = -1.0
        if not 0 <= seconds < float("inf"):
            raise UsageError(f"{where}: {value!r} is no number of seconds")
        if seconds < LEAST_S.get(name, 0.0):
            raise UsageError(f"{where}: {value!r} is too short; use {LEAST_S[name]:g} seconds or more")
        return seconds
    if kind == "list":
        parts = value if isinstance(value, list) else [value]
        endpoints = [word.strip() for part in parts for word in str(part).split(",")]
        for endpoint in endpoints:
            _check_endpoint(name, endpoint, where)
        return tuple(endpoints)
    if not isinstance(value, str):
        raise UsageError(f"{where}: {value!r} is no text")
    if value not in CHOICES.get(name, (value,)):
        raise UsageError(f"{where}: {value!r} is not possible; use {', '.join(CHOICES[name])}")
    _check_endpoint(name, value, where)
    return value


def _check_endpoint(name: str, value: str, where: str) -> None:
    if name in ("listen", "rpc_listen"):
        try:
            places.split_endpoint(value)
        except UsageError as error:
            raise UsageError(f"{where}: {error}") from None
    if name == "rpc" and not value.startswith(("ipc://", "tcp://")):
        raise UsageError(f"{where}: {value!r} is no ipc:// or tcp:// address")
