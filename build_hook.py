"""A wheel holds the log's C library, compiled where the wheel is built. The library needs no header of Python's, so one
wheel does for all versions of Python. Without a compiler the wheel holds the source alone, which is compiled when it is
needed.
"""

import importlib.util
import sysconfig
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class CompileHook(BuildHookInterface):
    """What hatchling calls for a wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":
            return
        spec = importlib.util.spec_from_file_location("hostlog", Path(self.root) / "src/keepbusy/log/hostlog.py")
        hostlog = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(hostlog)
        self.folder = TemporaryDirectory()
        made = Path(self.folder.name) / hostlog.LIBRARY.name
        if why := hostlog.compile_into(made):
            self.app.display_warning(f"The wheel has no library for the log: {why}")
            return
        build_data["force_include"][str(made)] = f"keepbusy/log/{made.name}"
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
