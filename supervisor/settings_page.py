"""Reference page of `rsup serve`, made from the table of settings.

`python -m rsup.supervisor.settings_page > docs/serve.md` writes the page; a test holds it equal to the table.
"""

from dataclasses import fields

from rsup.supervisor.config import SYSTEM_FILE, Settings, option_of

_INTRODUCTION = f"""\
<!-- Made by `python -m rsup.supervisor.settings_page`; do not edit. -->
# Settings of `rsup serve`

A flag wins over the environment, the environment over the TOML file (`--config FILE`, else `{SYSTEM_FILE}` where it exists),
that over the default. In the environment a list is separated by commas, and a switch is `1`, `0`, `true` or `false`.

| flag | environment | key in TOML | meaning (default) |
|---|---|---|---|"""


def page() -> str:
    """The reference page as Markdown."""
    return "\n".join([_INTRODUCTION, *(_row(setting.name) for setting in fields(Settings)), ""])


def _row(name: str) -> str:
    option = option_of(name)
    flag = f"{option.flag} {option.metavar}".strip()
    repeat = "; may be repeated" if option.kind == "list" else ""
    return f"| `{flag}` | `{option.env}` | `{name}` | {option.text}{repeat} |"


if __name__ == "__main__":
    print(page(), end="")
