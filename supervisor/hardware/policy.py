"""How much evidence weighs: the rules and limits of `device_policy.toml`, and a site's file merged over them.

Data only. A file that cannot be used is refused in one line that names file and key; the supervisor then does not start, so
that a slip of the pen does not put devices away or let them back.
"""

import os
import re
import tomllib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from rsup.supervisor.hardware.states import REACTIONS
from rsup.supervisor.wire import UsageError

DRAINS = ("now", "second", "never")
ENVIRONMENT = "RSUP_DEVICE_POLICY"
HOUR_US = 3_600_000_000
MAX_NAME_CHARS = 60
MOST_FRACTION = 0.5
"""No gate believes that more of a cluster is bad."""
MOST_NODES = 1000
"""Of each of the guard's numbers."""
BUILT_IN = "the built-in device policy"


class Rule(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One rule; the data file explains the fields."""

    source: str
    codes: list[str] = []
    generations: list[str] = []
    kind: str = "device"
    category: str = msgspec.field(default="", name="class")
    first: str = "note"
    repeat: str = ""
    repeat_count: int = 2
    window_h: float = 720.0
    weight: float = 0.0
    half_life_h: float = 0.0
    ttl_h: float = 0.0
    drain: str = "second"
    until: str = ""
    about: str = ""
    enabled: bool = True
    name: str = ""
    """Its key in the file."""

    @property
    def half_life_us(self) -> float:
        return self.half_life_h * HOUR_US

    @property
    def window_us(self) -> int:
        return int(self.window_h * HOUR_US)

    @property
    def may_move(self) -> bool:
        """Whether its evidence can lead to a state at all; else it is only kept."""
        return bool(self.weight or self.repeat or self.first != "note")


class Guard(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How many nodes may be refused to jobs, and drained for that; releases are never held up. `slurm.guard` applies it."""

    max_nodes: int = 2
    max_fraction: float = 0.05
    most_nodes: int = 50
    max_per_hour: int = 4
    max_per_rack: int = 2
    rack_pattern: str = r"^(.*?)[^0-9a-zA-Z]*[a-zA-Z]*[0-9]+$"

    def limit(self, num_eligible: int) -> int:
        """How many nodes may be refused at once, where so many could be."""
        return min(max(self.max_nodes, int(self.max_fraction * num_eligible)), self.most_nodes)

    def allows(self, num_refused: int, num_eligible: int, in_last_hour: int, in_rack: int = 0) -> bool:
        """Whether one more node may be refused. `num_eligible`: nodes that could be, zero is usual."""
        return not self.holds_back(num_refused, num_eligible, in_last_hour, in_rack)

    def holds_back(self, num_refused: int, num_eligible: int, in_last_hour: int, in_rack: int = 0) -> str:
        """Which limit is reached, empty for none."""
        limit = self.limit(num_eligible)
        if num_refused >= limit:
            return f"{num_refused} of at most {limit} nodes are refused already ({num_eligible} could be)"
        if in_last_hour >= self.max_per_hour:
            return f"{in_last_hour} nodes were refused within the hour (max_per_hour {self.max_per_hour})"
        if in_rack >= self.max_per_rack:
            return f"{in_rack} nodes of its rack are refused already (max_per_rack {self.max_per_rack})"
        return ""


class _Limits(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    suspect_ttl_h: float
    watch_ttl_h: float
    suspect_score: float
    node_suspect_score: float
    probation_clean_h: float
    allow_default_h: float
    allow_max_h: float


class Policy(Struct, frozen=True, kw_only=True):
    """A whole policy. `rules` in the order in which they are tried: those of a site's file come first."""

    name: str
    rules: tuple[Rule, ...]
    guard: Guard
    generations: dict[str, list[str]]
    suspect_ttl_h: float
    watch_ttl_h: float
    suspect_score: float
    node_suspect_score: float
    probation_clean_h: float
    allow_default_h: float
    allow_max_h: float

    def rule(self, kind: str, source: str, code: str, generation: str = "") -> Rule:
        """The rule for that evidence: one that names code and generation before one that names the code, then the source's own;
        where there is none, one that keeps a note. `generation` empty: unknown, which fits every rule."""
        best, found = -1, None
        for rule in self.rules:
            if rule.kind != kind or rule.source != source or (rule.codes and code not in rule.codes):
                continue
            if rule.generations and generation and generation not in rule.generations:
                continue
            precision = 2 * bool(rule.codes) + bool(rule.generations)
            if precision > best:
                best, found = precision, rule
        return found or Rule(source=source, kind=kind, name="none", about=f"{source} {code}: no rule of this policy")

    def generation(self, model: str) -> str:
        """The GPU generation of that model, empty where it is unknown. The longest word that fits decides."""
        fitting = [(len(word), name) for name, words in self.generations.items() for word in words if word in model]
        return max(fitting, default=(0, ""))[1]

    def label(self, rule: Rule) -> str:
        """What is kept with evidence."""
        return f"{self.name}/{rule.name}"

    def suspect_score_of(self, kind: str) -> float:
        return self.node_suspect_score if kind == "node" else self.suspect_score


def draining_at_once(policy: Policy) -> Policy:
    """The same policy, in which what drains a node at a second independent episode does so at the first."""
    rules = tuple(msgspec.structs.replace(rule, drain="now") if rule.drain == "second" else rule for rule in policy.rules)
    return msgspec.structs.replace(policy, rules=rules)


@cache
def built_in() -> Policy:
    """The policy that comes with rsup."""
    return _policy(_built_in_content(), [], BUILT_IN)


def load(path: str | Path | None = None) -> Policy:
    """The built-in policy with a site's file merged over it. Raise `UsageError` in one line for a file that cannot be used."""
    if not path:
        return built_in()
    try:
        return parse(Path(path).read_text(), str(path))
    except OSError as error:
        raise UsageError(f"the device policy {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"the device policy {path} is no TOML: {error}") from None


def parse(text: str, name: str) -> Policy:
    """The built-in policy with a site's file of this text merged over it. `name` is what messages call the file."""
    where = f"the device policy {name}"
    try:
        return _merged(tomllib.loads(text), Path(name).stem, where)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{where} is no TOML: {error}") from None


def configured(flag: str | None, environment: Mapping[str, str] | None = None) -> Policy:
    """As `--device-policy` says, else `RSUP_DEVICE_POLICY`. Raise `UsageError`."""
    environment = os.environ if environment is None else environment
    return load(flag or environment.get(ENVIRONMENT) or None)


def _built_in_content() -> dict[str, Any]:
    return tomllib.loads(files("rsup.supervisor.hardware").joinpath("device_policy.toml").read_text())


def _merged(own: dict[str, Any], stem: str, where: str) -> Policy:
    content = _built_in_content()
    for key, value in own.items():
        if key not in content:
            raise UsageError(f"{where}: unknown key {key!r}; there are {', '.join(content)}")
        if isinstance(content[key], dict) != isinstance(value, dict):
            raise UsageError(f"{where}: {key}: expected {'a table' if isinstance(content[key], dict) else 'a value'}")
        if key == "rules":
            _merge_rules(content[key], value, where)
        elif isinstance(value, dict):
            content[key] = {**content[key], **value}
        else:
            content[key] = value
    if "name" not in own:
        content["name"] = f"{content['name']}+{stem}"
    return _policy(content, list(own.get("rules", {})), where)


def _merge_rules(rules: dict[str, Any], own: dict[str, Any], where: str) -> None:
    for name, values in own.items():
        if not isinstance(values, dict):
            raise UsageError(f"{where}: rules.{name}: expected a table")
        rules[name] = {**rules.get(name, {}), **values}


def _policy(content: dict[str, Any], own_rules: list[str], where: str) -> Policy:
    """Check everything and put the site's rules first."""
    content = dict(content)
    tables = {key: content.pop(key) for key in ("rules", "guard", "generations")}
    limits = _converted(content, _Limits, "", where)
    guard = _converted(tables["guard"], Guard, "guard", where)
    generations = _converted(tables["generations"], dict[str, list[str]], "generations", where)
    named = {name: _rule(name, values, where, generations) for name, values in tables["rules"].items()}
    _check_limits(limits, guard, where)
    ordered = [*own_rules, *(name for name in named if name not in own_rules)]
    for names in (own_rules, ordered[len(own_rules) :]):
        _check_unambiguous([named[name] for name in names if named[name].enabled], where)
    rules = tuple(named[name] for name in ordered if named[name].enabled)
    return Policy(rules=rules, guard=guard, generations=generations, **msgspec.structs.asdict(limits))


def _rule(name: str, values: dict[str, Any], where: str, generations: Mapping[str, object]) -> Rule:
    key = f"rules.{name}"
    if "name" in values:
        raise UsageError(f"{where}: {key}.name: a rule's name is its key")
    rule: Rule = msgspec.structs.replace(_converted(values, Rule, key, where), name=name)
    checks = (
        ("kind", rule.kind in ("device", "node"), "use device or node"),
        ("first", rule.first in REACTIONS, f"use one of {', '.join(REACTIONS)}"),
        ("repeat", rule.repeat in ("", *REACTIONS), f"use one of {', '.join(REACTIONS)}"),
        ("drain", rule.drain in DRAINS, f"use one of {', '.join(DRAINS)}"),
        ("repeat_count", 2 <= rule.repeat_count <= 1000, "use a number from 2 to 1000"),
        ("window_h", 0 < rule.window_h <= 87_600, "use hours from 0 to 87600"),
        ("weight", 0 <= rule.weight <= 100, "use a number from 0 to 100"),
        ("half_life_h", 0 <= rule.half_life_h <= 87_600, "use hours from 0 to 87600"),
        ("ttl_h", 0 <= rule.ttl_h <= 87_600, "use hours from 0 to 87600"),
        ("generations", all(one in generations for one in rule.generations), f"use some of {', '.join(generations)}"),
    )
    for field, is_right, what in checks:
        if not is_right:
            raise UsageError(f"{where}: {key}.{field}: {getattr(rule, field)!r} is not possible; {what}")
    return rule


def _check_limits(limits: _Limits, guard: Guard, where: str) -> None:
    _check_guard(guard, where)
    for key, value in msgspec.structs.asdict(limits).items():
        if isinstance(value, int | float) and not 0 <= value <= 1_000_000:
            raise UsageError(f"{where}: {key}: {value!r} is not possible; use a number from 0 to 1000000")
    try:
        has_group = re.compile(guard.rack_pattern).groups >= 1
    except re.error:
        has_group = False
    if not has_group:
        raise UsageError(f"{where}: guard.rack_pattern: use a regular expression with a group, the rack in a node's name")
    if not limits.name or len(limits.name) > MAX_NAME_CHARS or not limits.name.isprintable() or "/" in limits.name:
        raise UsageError(f"{where}: name: use 1 to {MAX_NAME_CHARS} printable characters without a slash")
    if limits.watch_ttl_h < limits.suspect_ttl_h:
        raise UsageError(f"{where}: watch_ttl_h: suspicion becomes watch first, so it cannot be below suspect_ttl_h")


def _check_guard(guard: Guard, where: str) -> None:
    """A slip of the pen here is a guard that is none."""
    checks = (
        ("max_nodes", 0 <= guard.max_nodes <= guard.most_nodes, f"use a number from 0 to most_nodes ({guard.most_nodes})"),
        ("max_fraction", 0 <= guard.max_fraction <= MOST_FRACTION, f"use a part from 0 to {MOST_FRACTION}, as 0.05 for 5 %"),
        ("most_nodes", 0 <= guard.most_nodes <= MOST_NODES, f"use a number from 0 to {MOST_NODES}"),
        ("max_per_hour", 0 <= guard.max_per_hour <= MOST_NODES, f"use a number from 0 to {MOST_NODES}"),
        ("max_per_rack", 0 <= guard.max_per_rack <= MOST_NODES, f"use a number from 0 to {MOST_NODES}"),
    )
    for field, is_right, what in checks[2:] + checks[:2]:
        if not is_right:
            raise UsageError(f"{where}: guard.{field}: {getattr(guard, field)!r} is not possible; {what}")


def _check_unambiguous(rules: list[Rule], where: str) -> None:
    seen: dict[tuple[str, str, str, bool], str] = {}
    for rule in rules:
        for code in rule.codes or [""]:
            key = (rule.kind, rule.source, code, bool(rule.generations))
            if key in seen and not rule.generations:
                what = f"code {code!r} of {rule.source}" if code else f"all of {rule.source}"
                raise UsageError(f"{where}: rules.{rule.name}: {what} is rules.{seen[key]}'s already")
            seen[key] = rule.name


def _converted(values: Any, kind: Any, key: str, where: str) -> Any:
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        message, _, at = str(error).partition(" - at `$")
        place = ".".join(part for part in (key, at.rstrip("`").lstrip(".")) if part)
        raise UsageError(f"{where}: {place + ': ' if place else ''}{message[:1].lower()}{message[1:]}") from None
