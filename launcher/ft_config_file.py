"""ft_launcher's YAML file: its section `fault_tolerance`, as settings beneath those of the command line."""

from pathlib import Path

from rsup.launcher.command_line import Setting
from rsup.launcher.option_table import HANG_LIMITS, NO_EFFECT, OptionIndex, did_you_mean
from rsup.supervisor.wire import UsageError

SECTION = "fault_tolerance"


def read_config_file(path: str, index: OptionIndex, section_may_miss: bool) -> tuple[dict[str, Setting], list[str]]:
    """Settings by `Option.dest`, and notes about keys that we do not know.

    A key whose value is null is unset, except where null means no limit, which is the same. Raise `UsageError` for a file
    that cannot be read, is no YAML, or has no such section (unless that may miss).
    """
    section = _find_section(_load(path))
    if section is None:
        if section_may_miss:
            return {}, []
        raise UsageError(f"--ft-cfg-path {path}: has no section {SECTION}; add one, or --ft-ignore-missing-cfg")
    if not isinstance(section, dict):
        raise UsageError(f"--ft-cfg-path {path}: {SECTION} must be a mapping of options to values")
    settings: dict[str, Setting] = {}
    notes: list[str] = []
    ours = [(name, option) for name, option in index.by_flag.items() if option.group in (HANG_LIMITS, NO_EFFECT)]
    known = {name.removeprefix("--").removeprefix("ft-"): option for name, option in ours}
    for key, value in section.items():
        name = str(key).replace("_", "-").removeprefix("ft-")
        option = known.get(name)
        if option is None or option.dest == "ft_cfg_path":
            near = did_you_mean(name, list(known)).replace("-", "_")
            notes.append(f"{path}: unknown key {key} of {SECTION} is ignored{near}")
        elif value is not None:
            settings[option.dest] = Setting(_as_text(value, path, key), f"{path}: {key}")
    return settings, notes


def _load(path: str) -> object:
    import yaml

    try:
        document: object = yaml.safe_load(Path(path).read_text())
    except OSError as error:
        raise UsageError(f"--ft-cfg-path {path}: {error.strerror}; give a YAML file that can be read") from None
    except (yaml.YAMLError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f" (line {mark.line + 1})" if mark is not None else ""
        raise UsageError(f"--ft-cfg-path {path}: is not YAML{where}") from None
    return document


def _find_section(document: object) -> object | None:
    """The first section of that name, at any depth."""
    if isinstance(document, dict):
        if SECTION in document:
            found: object = document[SECTION]
            return {} if found is None else found
        children = list(document.values())
    else:
        children = document if isinstance(document, list) else []
    return next((found for found in map(_find_section, children) if found is not None), None)


def _as_text(value: object, path: str, key: object) -> str:
    """A YAML value as it would stand on the command line."""
    if isinstance(value, bool):
        return "1" if value else "0"
    if isinstance(value, dict):
        for name in value:
            if not isinstance(name, str) or "," in name or ":" in name:
                raise UsageError(f"{path}: {key}: section name {name!r} must be text without `,` and `:`")
        return ",".join(f"{name}:{'none' if limit is None else limit}" for name, limit in value.items())
    if isinstance(value, list):
        return ",".join(str(part) for part in value)
    return str(value)
