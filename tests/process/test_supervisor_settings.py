"""Settings of the daemon from flags, environment and file; and when an embedded one ends."""

import dataclasses
from pathlib import Path

import pytest

from rsup.supervisor import config, lifetime, settings_page
from rsup.supervisor.config import Settings
from rsup.supervisor.lifetime import AgentSeen, Lifetime
from rsup.supervisor.wire import UsageError

EXAMPLES = {
    "state_dir": ("/s", "/s"),
    "embedded": ("true", True),
    "rpc": ("ipc:///r", ("ipc:///r",)),
    "rpc_listen": ("h:1", ("h:1",)),
    "listen": ("h:2", "h:2"),
    "database_url": ("postgresql://h/d", "postgresql://h/d"),
    "key_file": ("/k", "/k"),
    "operators": ("@staff", ("@staff",)),
    "socket_dir": ("/run/s", "/run/s"),
    "munge_socket": ("/run/m", "/run/m"),
    "idle_exit": ("2.5", 2.5),
    "device_policy": ("/p.toml", "/p.toml"),
    "accept_injected": ("true", True),
    "drains": ("act", "act"),
    "drain_after": ("one", "one"),
    "quarantine_by": ("reservation", "reservation"),
    "bad_gpu": ("refuse", "refuse"),
    "avoid_suspects": ("on", True),
    "scontrol": ("sudo -n scontrol", "sudo -n scontrol"),
    "drain_interval": ("0.5", 0.5),
    "cluster": ("c", "c"),
    "signing_key_file": ("/sk", "/sk"),
    "debug": ("yes", True),
}


def test_every_setting_has_an_example() -> None:
    assert set(EXAMPLES) == {field.name for field in dataclasses.fields(Settings)}


@pytest.mark.parametrize("name", EXAMPLES)
def test_flag_environment_and_file_agree(name: str, tmp_path: Path) -> None:
    text, value = EXAMPLES[name]
    option = config.option_of(name)
    by_flag = config.load([option.flag] if option.kind == "switch" else [option.flag, text], {})
    by_env = config.load([], {option.env: text})
    file = tmp_path / "rsup.toml"
    literal = str(value).lower() if isinstance(value, bool | float) else f'["{text}"]' if option.kind == "list" else f'"{text}"'
    file.write_text(f"{name} = {literal}\n")
    by_file = config.load(["--config", str(file)], {})
    assert getattr(by_flag, name) == getattr(by_env, name) == getattr(by_file, name) == value
    assert getattr(config.load([], {}), name) == getattr(Settings(), name) != value


def test_a_flag_beats_the_environment_beats_the_file(tmp_path: Path) -> None:
    file = tmp_path / "rsup.toml"
    file.write_text('listen = "file:1"\nkey_file = "/file"\nidle_exit = 1\n')
    settings = config.load(["--config", str(file), "--listen", "flag:1"], {"RSUP_LISTEN": "env:1", "RSUP_KEY_FILE": "/env"})
    assert (settings.listen, settings.key_file, settings.idle_exit) == ("flag:1", "/env", 1.0)


def test_repeated_flags_and_commas_make_lists() -> None:
    assert config.load(["--rpc", "ipc:///a", "--rpc", "ipc:///b"], {}).rpc == ("ipc:///a", "ipc:///b")
    assert config.load(["--operators", "ann, @hpc", "--operators", "ben"], {}).operators == ("ann", "@hpc", "ben")
    assert config.load([], {"RSUP_RPC_LISTEN": "a:1, b:2"}).rpc_listen == ("a:1", "b:2")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("idle = 3", "unknown setting 'idle'"),
        ("listen = 3", "is no text"),
        ("debug = 'perhaps'", "neither"),
        ("a = ", "cannot read"),
    ],
)
def test_a_wrong_file_is_refused_with_its_name(content: str, says: str, tmp_path: Path) -> None:
    file = tmp_path / "rsup.toml"
    file.write_text(content)
    with pytest.raises(UsageError, match=says) as refused:
        config.load(["--config", str(file)], {})
    assert str(file) in str(refused.value) and "\n" not in str(refused.value)


def test_defaults_differ_between_embedded_and_serve() -> None:
    assert (Settings().rest_endpoint, Settings().idle_exit_s) == ("127.0.0.1:8650", None)
    embedded = Settings(embedded=True)
    assert (embedded.rest_endpoint, embedded.idle_exit_s) == ("127.0.0.1:0", 60.0)
    assert Settings(idle_exit=3.0).idle_exit_s is None


def test_it_ends_only_after_being_idle_without_a_break() -> None:
    life = Lifetime(60.0, now_s=0.0)
    assert not life.is_over(59.9, 0, 0)
    assert not life.is_over(60.0, 1, 0)
    assert not life.is_over(100.0, 0, 1)
    assert not life.is_over(159.9, 0, 0)
    assert life.is_over(160.0, 0, 0)
    assert not Lifetime(None, 0.0).is_over(1e9, 0, 0)


@pytest.mark.parametrize(
    ("agents", "gone"),
    [
        ([], []),
        ([AgentSeen("a", 4000, False)], ["a"]),
        ([AgentSeen("a", 19, False)], []),
        ([AgentSeen("a", 0, False, rebooted=True)], ["a"]),
        ([AgentSeen("a", 0, False, rebooted=True), AgentSeen("b", 19, False)], []),
        ([AgentSeen("a", 4000, True)], []),
        ([AgentSeen("a", 4000, None)], []),
        ([AgentSeen("a", 4000, False), AgentSeen("b", 4000, None)], []),
        ([AgentSeen("a", 4000, False), AgentSeen("b", 9000, False)], ["a", "b"]),
    ],
)
def test_a_job_is_abandoned_only_if_all_its_agents_are_known_dead_here(agents: list[AgentSeen], gone: list[str]) -> None:
    assert lifetime.abandoned(agents) == gone


def test_the_reference_page_is_the_table() -> None:
    assert (Path(__file__).parents[2] / "docs" / "serve.md").read_text() == settings_page.page(), "run: make docs"
