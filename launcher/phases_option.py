"""`--phases FILE`: stretches of the training, each with arguments and environment of its own. Bad files are refused in a line.

TOML, or JSON with the same names (there also a bare list):

    [[phases]]
    name = "web text"
    until_iteration = 100000
    arguments = ["--data-path", "/data/web"]

    [[phases]]
    arguments = ["--data-path", "/data/books"]
    environment = { MIX = "books" }
"""

import hashlib
import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rsup.launcher.option_table import BadValue, Option, did_you_mean
from rsup.launcher.option_values import OptionValues
from rsup.supervisor.wire import PhaseSpec

PHASES_OPTIONS: Sequence[Option] = (
    Option(
        ("--phases",),
        shown_default="one phase",
        meaning="TOML or JSON file with the phases of the training: `until_iteration`, `arguments`, `environment` and `name` of"
        " each. At the end of one the ranks save and leave, and start again as the next one says. See leaving.md.",
    ),
)
MAX_BYTES = 1 << 20
MAX_PHASES = 1000
_KEYS = ("name", "until_iteration", "arguments", "environment")
_OURS = ("RSUP_", "TORCHELASTIC_", "FT_")
_TORCHRUN = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
    *("ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
)


@dataclass(frozen=True)
class LaunchPhase:
    """One phase. `until_iteration` 0: the last one. `arguments` come after those of the script."""

    until_iteration: int = 0
    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    name: str = ""

    def spec(self) -> PhaseSpec:
        """What the supervisor knows of it: secrets stay here."""
        content = json.dumps([self.arguments, sorted(self.environment.items())])
        return PhaseSpec(self.until_iteration, self.name, hashlib.sha256(content.encode("utf-8", "replace")).hexdigest()[:16])


def read_phases(values: OptionValues) -> tuple[LaunchPhase, ...]:
    """The phases of `--phases`; none without it."""
    path = values.maybe_text("phases")
    if not path:
        return ()
    return _Reader(values, path).read()


class _Reader:
    """Reads one file; what it refuses names the file and the phase, counted from 1."""

    def __init__(self, values: OptionValues, path: str) -> None:
        self._values = values
        self._path = path

    def _refuse(self, why: str) -> BadValue:
        return BadValue(f"{self._values.settings['phases'].source}: {why}")

    def read(self) -> tuple[LaunchPhase, ...]:
        document = self._document()
        if isinstance(document, dict):
            others = [key for key in document if key != "phases"]
            if others:
                raise self._refuse(f"unknown key {others[0]}{did_you_mean(str(others[0]), ('phases',))}; there is only phases")
            document = document.get("phases")
        if not isinstance(document, list) or not document:
            raise self._refuse("has no list phases; begin each phase with [[phases]]")
        if len(document) > MAX_PHASES:
            raise self._refuse(f"has {len(document)} phases; at most {MAX_PHASES} are possible")
        phases = tuple(self._phase(number, entry) for number, entry in enumerate(document, 1))
        self._check_order(phases)
        return phases

    def _document(self) -> object:
        path = Path(self._path).expanduser()
        try:
            if path.stat().st_size > MAX_BYTES:
                raise self._refuse("is larger than 1 MiB: is it the right file?")
            text = path.read_text()
        except OSError as error:
            raise self._refuse(f"{error.strerror}; give a TOML or JSON file that can be read") from None
        except UnicodeDecodeError:
            raise self._refuse("is no text; give a TOML or JSON file") from None
        is_json = path.suffix == ".json" or text.lstrip()[:1] == "{"
        try:
            document: object = json.loads(text) if is_json else tomllib.loads(text)
        except (ValueError, RecursionError) as error:
            kind = "JSON" if is_json else "TOML"
            raise self._refuse(f"is not {kind}: {str(error).splitlines()[0]}") from None
        return document

    def _phase(self, number: int, entry: object) -> LaunchPhase:
        if not isinstance(entry, dict):
            raise self._refuse(f"phase {number} is no table of {', '.join(_KEYS)}")
        for key in entry:
            if key not in _KEYS:
                meant = did_you_mean(str(key), _KEYS)
                raise self._refuse(f"phase {number}: unknown key {key}{meant}; known: {', '.join(_KEYS)}")
        until, name = entry.get("until_iteration", 0), entry.get("name", "")
        if isinstance(until, bool) or not isinstance(until, int) or ("until_iteration" in entry and until < 1):
            raise self._refuse(f"phase {number}: until_iteration must be a whole number of at least 1, not {until!r}")
        if not isinstance(name, str) or len(name) > 100 or not name.isprintable():
            raise self._refuse(f"phase {number}: name must be a text of at most 100 characters")
        return LaunchPhase(until, self._arguments(number, entry), self._environment(number, entry), name)

    def _arguments(self, number: int, entry: Mapping[str, object]) -> tuple[str, ...]:
        arguments = entry.get("arguments", [])
        if not isinstance(arguments, list) or any(not isinstance(word, str) or "\0" in word for word in arguments):
            raise self._refuse(f'phase {number}: arguments must be a list of texts, as ["--lr", "1e-4"]')
        return tuple(arguments)

    def _environment(self, number: int, entry: Mapping[str, object]) -> dict[str, str]:
        environment = entry.get("environment", {})
        if not isinstance(environment, dict) or any(not isinstance(value, str) for value in environment.values()):
            raise self._refuse(f'phase {number}: environment must be a table of texts, as {{ MIX = "a" }}')
        for variable, value in environment.items():
            if not variable or "=" in variable or "\0" in variable + value:
                raise self._refuse(f"phase {number}: {variable!r} is no variable of an environment")
            if variable.startswith(_OURS) or variable in _TORCHRUN:
                raise self._refuse(f"phase {number}: {variable} is set by the launcher; leave it out")
        return dict(environment)

    def _check_order(self, phases: tuple[LaunchPhase, ...]) -> None:
        before = 0
        for number, phase in enumerate(phases, 1):
            is_last = number == len(phases)
            if is_last and phase.until_iteration:
                raise self._refuse(f"phase {number} is the last one, it ends with the training: leave its until_iteration out")
            if not is_last and not phase.until_iteration:
                raise self._refuse(f"phase {number} needs until_iteration: {len(phases) - number} more come after it")
            if not is_last and phase.until_iteration <= before:
                ends = f"ends at iteration {phase.until_iteration}, but the one before ends at {before}"
                raise self._refuse(f"phase {number} {ends}: they must grow")
            before = phase.until_iteration or before
