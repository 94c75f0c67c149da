"""Make an editable install importable as ``rsup.*``: links in ``.editable/rsup/`` to the source folders."""

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class EditableLinks(BuildHookInterface[Any]):
    """Link each packaged folder below ``.editable/rsup``; wheels and sdists copy the files instead."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Make the links when ``version`` is ``"editable"``."""
        if version != "editable":
            return
        namespace = Path(self.root, ".editable", "rsup")
        namespace.mkdir(parents=True, exist_ok=True)
        for folder in self.build_config.packages:
            link = namespace / folder
            link.unlink(missing_ok=True)
            link.symlink_to(Path("..", "..", folder), target_is_directory=True)
