"""ft_launcher's options in every spelling, its YAML file, and the limits that come of them."""

import ast
import importlib.util
from pathlib import Path

import pytest
import yaml

from rsup.launcher.ft_options import FT_OPTIONS, NO_PROGRESS_BOUND_OFF
from rsup.launcher.launch_options import LaunchOptions, job_spec, restart_policy
from rsup.launcher.launch_parser import ALL_OPTIONS, parse_launch
from rsup.launcher.option_table import NO_EFFECT, Option, OptionIndex
from rsup.supervisor.wire import Limits, UsageError

INDEX = OptionIndex(ALL_OPTIONS)

NVRX_0_4_1 = """
--fault-tol-cfg-path --ignore-missing-fault-tol-cfg --ft-param-workload_check_interval --ft-param-initial_rank_heartbeat_timeout
--ft-param-rank_heartbeat_timeout --ft-param-node_health_check_interval --ft-param-safety_factor
--ft-param-rank_termination_signal --ft-param-log_level --ft-param-rank_out_of_section_timeout --ft-param-rank_section_timeouts
--ft-param-restart_check_interval --restart-policy --restart_policy --ft-param-enable-nic-monitor --ft_param_enable_nic_monitor
--ft-param-pci-topo-file --ft_param_pci_topo_file --ft-param-link-down-path-template --ft_param_link_down_path_template
--ft-cfg-path --ft-cfg_path --ft-restart-policy --ft-restart_policy --term-timeout --workers_stop_timeout
"""
NVRX_MAIN = """
--ft-workload-check-interval --ft-node-health-check-endpoint --ft-enable_nic_healthcheck --ft-link-state-path-template
--ft_enable_dist_storage_healthcheck --ft_storage_health_check_path --ft-skip-section-response --ft-rdzv-impl --ft-segment
--ft-numa-bind-strict --ft-gpu_memory_reclaim_timeout --ft-gpu-memory-tolerance-mb --ft-gpu-memory-poll-interval
--ft-check-remaining-processes --ft-install-exception-hook --ft-ignore-missing-cfg --ft-max-no-progress-cycles
--ft-min-progress-iterations --ft-checkpoint-iteration-file --ft-no-restart-exit-code --ft-cycle-info-dir
--ft-per-cycle-applog-prefix --ft-nvrx-logfile --ft-enable-log-server --ft-log-server-port --ft-log-aggregator-count
--ft-log-leaf-max-queue-chunks --ft-log-server-log-prefix --ft-log-server-graceful-shutdown-timeout
--ft-attribution-endpoint --ft-attribution-startup-timeout --ft-attribution-llm-api-key-file --ft-attribution-llm-base-url
--ft-attribution-llm-model --ft-attribution-analysis-backend --ft-attribution-stop-action --ft-attribution-log-level
--ft-attribution-export-url
"""


def parse(*words: str) -> LaunchOptions:
    return parse_launch([*words, "s.py"], {})


def write(tmp_path: Path, text: str) -> str:
    path = tmp_path / "ft.yaml"
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize("flag", (NVRX_0_4_1 + NVRX_MAIN).split())
def test_ft_launchers_flags_are_known(flag: str) -> None:
    assert INDEX.exact(flag) in FT_OPTIONS


@pytest.mark.parametrize("flag", ["--ft-{d}", "--ft_{u}", "--ft-{u}", "--ft-param-{u}", "--ft-param-{d}", "--ft_param_{u}"])
def test_every_spelling(flag: str) -> None:
    spelled = flag.format(d="rank-heartbeat-timeout", u="rank_heartbeat_timeout")
    assert parse(spelled, "7").limits.heartbeat_s == 7
    assert parse(f"{spelled}=7.5").limits.heartbeat_s == 7.5


def test_no_limit_is_on_unless_asked_for() -> None:
    assert parse().limits == Limits()
    limits = parse().limits
    assert limits.sections == {} and not limits.enforce_calculated
    assert {limits.out_of_section_s, limits.initial_heartbeat_s, limits.heartbeat_s, limits.startup_s, limits.warmup_s} == {
        None
    }


@pytest.mark.parametrize(
    ("text", "sections"),
    [
        ("setup:600,step:180,checkpointing:420", {"setup": 600, "step": 180, "checkpointing": 420}),
        (" setup : 1.5 , step:none", {"setup": 1.5, "step": None}),
        ("a:null,b:", {"a": None, "b": None}),
        ("", {}),
        ("none", {}),
    ],
)
def test_section_timeouts(text: str, sections: dict[str, float | None]) -> None:
    assert parse("--ft-rank-section-timeouts", text).limits.sections == sections


def test_warmup_is_the_limit_of_the_first_steps() -> None:
    limits = parse("--ft-rank-section-timeouts", "step:10,warmup:100", "--ft-num-warmup-iters", "2").limits
    assert (limits.warmup_s, limits.num_warmup_iters) == (100, 2)


@pytest.mark.parametrize("word", ["none", "null", "None", "''"])
def test_words_for_no_limit(word: str) -> None:
    assert parse("--ft-rank-heartbeat-timeout", word.strip("'")).limits.heartbeat_s is None


def test_calculated_limits() -> None:
    options = parse("--calc-ft-timeouts", "--ft-safety-factor", "3")
    assert options.calc_ft_timeouts and options.limits.enforce_calculated and options.limits.safety_factor == 3
    assert not parse("--ft-safety-factor", "3").limits.enforce_calculated


@pytest.mark.parametrize("mode", ["restart", "report", "auto"])
def test_on_hang_reaches_the_policy(mode: str) -> None:
    assert restart_policy(parse("--on-hang", mode)).on_hang == mode


@pytest.mark.parametrize(
    "words",
    [
        ("--ft-rank-section-timeouts", "step"),
        ("--ft-rank-section-timeouts", "step:0"),
        ("--ft-rank-section-timeouts", "step:-1"),
        ("--ft-rank-section-timeouts", "step:soon"),
        ("--ft-rank-section-timeouts", "step:nan"),
        ("--ft-rank-section-timeouts", "step:1,step:2"),
        ("--ft-rank-section-timeouts", ":3"),
        ("--ft-rank-heartbeat-timeout", "0"),
        ("--ft-rank-heartbeat-timeout", "inf"),
        ("--ft-rank-heartbeat-timeout", "-3"),
        ("--ft-safety-factor", "0.5"),
        ("--ft-num-warmup-iters", "-1"),
        ("--ft-num-warmup-iters", "1.5"),
        ("--ft-restart-policy", "never"),
        ("--ft-rank-termination-signal", "SIGNOPE"),
        ("--on-hang", "kill"),
    ],
)
def test_impossible_values_are_refused_by_name(words: tuple[str, str]) -> None:
    with pytest.raises(UsageError) as refused:
        parse(*words)
    assert str(refused.value).startswith(f"{words[0]} {words[1]}: ")


@pytest.mark.parametrize("option", [option for option in FT_OPTIONS if option.no_effect], ids=lambda option: option.dest)
def test_what_has_no_effect_is_accepted_with_a_note(option: Option) -> None:
    assert option.group == NO_EFFECT
    options = parse(option.flag, "9")
    assert options.notes == (f"{option.flag} has no effect: {option.no_effect}",)
    assert options.limits == Limits()


def test_notes_of_one_reason_share_a_line() -> None:
    notes = parse("--ft-gpu-memory-tolerance-mb", "1", "--ft-gpu-memory-poll-interval", "1").notes
    assert notes == (
        "--ft-gpu-memory-tolerance-mb, --ft-gpu-memory-poll-interval have no effect: a new attempt starts when every process of"
        " the old one is gone",
    )


def test_no_progress_cycles_count_attempts_ours_count_restarts() -> None:
    assert parse("--restart", "auto", "--ft-max-no-progress-cycles", "3").no_progress_limit == 2
    assert parse("--restart", "auto", "--ft-max-no-progress-cycles", "-1").no_progress_limit == NO_PROGRESS_BOUND_OFF
    assert parse("--ft-max-no-progress-cycles", "3", "--no-progress-restarts", "5").no_progress_limit == 5
    assert parse().no_progress_limit == 3
    assert "with --restart auto or --ft-checkpoint" in parse("--ft-max-no-progress-cycles", "3").notes[0]


def test_an_iteration_file_bounds_restarts_as_nvrxs_progress_tracker_does(tmp_path: Path) -> None:
    file = str(tmp_path / "latest")
    options = parse("--max-restarts", "9", "--ft-checkpoint-iteration-file", file, "--ft-min-progress-iterations", "50")
    assert options.notes == () and str(options.checkpoint_iteration_file) == file
    policy = restart_policy(options)
    assert (policy.bounds_progress, policy.no_progress_limit, policy.min_progress_iterations) == (True, 2, 50)
    policy = restart_policy(parse("--ft-checkpoint-iteration-file", file, "--ft-max-no-progress-cycles", "5"))
    assert policy.no_progress_limit == 4
    assert not restart_policy(parse()).bounds_progress


def test_the_exit_code_for_please_do_not_requeue() -> None:
    assert restart_policy(parse()).no_requeue_exit_code == 93
    assert restart_policy(parse("--ft-no-restart-exit-code", "77")).no_requeue_exit_code == 77
    with pytest.raises(UsageError):
        parse("--ft-no-restart-exit-code", "256")


@pytest.mark.parametrize("word", ["None", "null", ""])
def test_null_leaves_an_option_unset(word: str, tmp_path: Path) -> None:
    words = ("--ft-safety-factor", "--ft-num-warmup-iters", "--ft-max-no-progress-cycles", "--ft-min-progress-iterations")
    given = [
        part
        for flag in (*words, "--ft-workload-check-interval", "--ft-segment", "--ft-no-restart-exit-code")
        for part in (flag, word)
    ]
    assert parse(*given) == parse()


def installed_ft_launcher() -> Path:
    spec = importlib.util.find_spec("nvidia_resiliency_ext")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("nvidia-resiliency-ext is not installed")
    return Path(spec.submodule_search_locations[0]) / "fault_tolerance"


def test_every_option_of_the_installed_ft_launcher_is_known_and_takes_as_many_words() -> None:
    seen = 0
    for node in ast.walk(ast.parse((installed_ft_launcher() / "launcher.py").read_text())):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument"):
            continue
        flags = [arg.value for arg in node.args if isinstance(arg, ast.Constant) and str(arg.value).startswith("-")]
        action = {word.arg: ast.unparse(word.value) for word in node.keywords}.get("action", "")
        for flag in flags:
            option = INDEX.exact(str(flag))
            assert option is not None, flag
            assert option.is_switch == (action in ("check_env", "'store_true'")), flag
            seen += 1
    assert seen > 60


def test_every_key_of_the_installed_configuration_is_known(tmp_path: Path) -> None:
    tree = ast.parse((installed_ft_launcher() / "config.py").read_text())
    cls = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "FaultToleranceConfig")
    keys = [node.target.id for node in cls.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)]
    assert len(keys) > 10
    options = parse("--ft-cfg-path", write(tmp_path, yaml.safe_dump({"fault_tolerance": dict.fromkeys(keys, None)})))
    assert options.notes == () and options.limits == Limits()


def test_an_ft_launcher_command_line_as_people_write_it(tmp_path: Path) -> None:
    path = write(tmp_path, YAML)
    words = (
        "--nproc-per-node=4 --nnodes=1 --rdzv-backend=c10d --rdzv_endpoint=localhost:1234 --rdzv-conf=is_host=1,join_timeout=60"
        " --rdzv_id=none --max-restarts=10 --monitor-interval=5 --term-timeout=7 --workers-stop-timeout 3"
        " --restart-policy=any-failed"
        f" --fault-tol-cfg-path={path} --ft-param-rank_section_timeouts=setup:60,step:30 --ft-param-log_level=DEBUG"
        " --ft_param_enable_nic_monitor false --ignore-missing-fault-tol-cfg"
    )
    options = parse(*words.split())
    assert (options.nproc_per_node, options.max_restarts, options.shutdown_timeout, options.stop_grace) == (4, 10, 7, 3)
    assert options.limits.sections == {"setup": 60, "step": 30} and options.limits.heartbeat_s == 50
    assert options.training_script == "s.py" and options.join_timeout == 60


def test_min_healthy_gets_a_note() -> None:
    assert (
        parse("--restart-policy", "min-healthy").notes[0].startswith("--ft-restart-policy min-healthy is taken as any-failed")
    )
    assert parse("--ft-restart-policy", "any-failed").notes == ()


YAML = """
trainer:
  - name: x
  - resiliency:
      fault_tolerance:
        rank_heartbeat_timeout: 50
        initial_rank_heartbeat_timeout: null
        rank_out_of_section_timeout: 30.5
        rank_section_timeouts: {setup: 600, step: null, checkpointing: 420}
        safety_factor: 3
        log_level: INFO
        num_warmup_iterations: 7
"""


def test_yaml_is_found_at_any_depth(tmp_path: Path) -> None:
    options = parse("--ft-cfg-path", write(tmp_path, YAML))
    assert options.limits == Limits(
        sections={"setup": 600, "step": None, "checkpointing": 420},
        out_of_section_s=30.5,
        heartbeat_s=50,
        safety_factor=3,
        num_warmup_iters=7,
    )
    assert options.notes == ("--ft-log-level has no effect: use --debug",)


def test_the_command_line_wins_over_yaml_also_with_a_default(tmp_path: Path) -> None:
    path = write(tmp_path, YAML)
    limits = parse("--fault-tol-cfg-path", path, "--ft-param-safety_factor", "5", "--ft-rank-heartbeat-timeout", "none").limits
    assert (limits.safety_factor, limits.heartbeat_s, limits.out_of_section_s) == (5, None, 30.5)
    assert parse("--ft-cfg-path", path, "--ft-rank-section-timeouts", "step:9").limits.sections == {"step": 9}


def test_unknown_keys_of_yaml_get_a_note(tmp_path: Path) -> None:
    path = write(tmp_path, "fault_tolerance: {rank_hartbeat_timeout: 3, zzz: 1}")
    assert parse("--ft-cfg-path", path).notes == (
        f"{path}: unknown key rank_hartbeat_timeout of fault_tolerance is ignored: did you mean rank_heartbeat_timeout?",
        f"{path}: unknown key zzz of fault_tolerance is ignored",
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", "is not YAML (line 1)"),
        ("a: 1", "has no section fault_tolerance"),
        ("", "has no section fault_tolerance"),
        ("fault_tolerance: 3", "fault_tolerance must be a mapping"),
        ("fault_tolerance: {rank_section_timeouts: {'a:b': 3}}", "section name 'a:b'"),
        ("fault_tolerance: {safety_factor: 0}", "ft.yaml: safety_factor: must be at least 1"),
        ("fault_tolerance: {rank_section_timeouts: {step: soon}}", "ft.yaml: rank_section_timeouts: 'soon' is not a number"),
        ("\x00", "is not YAML"),
    ],
)
def test_bad_yaml_is_refused(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as refused:
        parse("--ft-cfg-path", write(tmp_path, text))
    assert message in str(refused.value) and "\n" not in str(refused.value)


def test_a_missing_section_can_be_allowed_a_missing_file_cannot(tmp_path: Path) -> None:
    assert parse("--ft-cfg-path", write(tmp_path, "a: 1"), "--ignore-missing-fault-tol-cfg").limits == Limits()
    assert parse("--ft-cfg-path", write(tmp_path, ""), "--ft-rank-heartbeat-timeout", "7").limits.heartbeat_s == 7
    with pytest.raises(UsageError, match="No such file"):
        parse("--ft-cfg-path", str(tmp_path / "none.yaml"), "--ft-rank-heartbeat-timeout", "7")
    with pytest.raises(UsageError, match="No such file"):
        parse("--ft-cfg-path", str(tmp_path / "none.yaml"), "--ft-ignore-missing-cfg")


def test_limits_and_policy_reach_the_job_spec() -> None:
    words = "--ft-rank-heartbeat-timeout 7 --max-restarts 2 --restart auto --backoff 1:8 --identical-failures 2 --stop-grace 4"
    spec = job_spec(parse(*words.split(), "--fence-timeout", "60", "--nproc-per-node", "2"), "me", listen="h:1")
    assert spec.limits.heartbeat_s == 7 and spec.owner == "me" and spec.listen == "h:1" and spec.ranks_per_node == 2
    assert (spec.policy.mode, spec.policy.max_restarts, spec.policy.identical_limit) == ("auto", 2, 2)
    assert (spec.policy.backoff_first_s, spec.policy.backoff_max_s) == (1, 8)
    assert (spec.stop_grace_s, spec.fence_timeout_s) == (4, 60)
