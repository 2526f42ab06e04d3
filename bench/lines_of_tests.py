"""Which lines of which modules each test runs."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest


class LinesOfTests:
    """A pytest plugin that notes which lines of some modules each test runs, its fixtures included.

    Attributes
    ----------
    found
        Test: its seconds, its lines by module, and whether it passed. A test that does not pass even without a mutant
        has a second entry, "failed " and its name.
    """

    def __init__(self, tree: Path, modules: list[str], file: Path) -> None:
        self._files = {str(tree / module): module for module in modules}
        self._file = file
        self._now: dict[str, set[int]] = {}
        self.found: dict[str, dict[str, Any]] = {}

    def save(self) -> None:
        """Write what was found."""
        self._file.write_text(json.dumps(self.found))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[Any]:
        """Trace a test."""
        self._now = {}
        self._begin()
        started = time.perf_counter()
        try:
            return (yield)
        finally:
            self._end()
            lines = {module: sorted(lines) for module, lines in self._now.items()}
            self.found[item.nodeid] = {"seconds": time.perf_counter() - started, "lines": lines, "passed": True}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note a test that does not pass."""
        if not report.passed:
            self.found.setdefault(f"failed {report.nodeid}", {"seconds": 0, "lines": {}, "passed": False})

    def _begin(self) -> None:
        if sys.version_info < (3, 12):
            threading.settrace(self._trace)
            sys.settrace(self._trace)
            return
        monitoring = sys.monitoring
        monitoring.use_tool_id(monitoring.COVERAGE_ID, "lines of tests")
        monitoring.register_callback(monitoring.COVERAGE_ID, monitoring.events.LINE, self._line)
        monitoring.set_events(monitoring.COVERAGE_ID, monitoring.events.LINE)
        monitoring.restart_events()

    def _end(self) -> None:
        if sys.version_info < (3, 12):
            sys.settrace(None)
            threading.settrace(None)  # type: ignore[arg-type]
            return
        sys.monitoring.set_events(sys.monitoring.COVERAGE_ID, 0)
        sys.monitoring.free_tool_id(sys.monitoring.COVERAGE_ID)

    def _line(self, code: CodeType, line: int) -> Any:
        module = self._files.get(code.co_filename)
        if module is not None:
            self._now.setdefault(module, set()).add(line)
        return sys.monitoring.DISABLE  # until the next test

    def _trace(self, frame: FrameType, _event: str, _argument: object) -> Any:
        module = self._files.get(frame.f_code.co_filename)
        if module is None:
            return None
        lines = self._now.setdefault(module, set())
        lines.add(frame.f_lineno)

        def line(frame: FrameType, _event: str, _argument: object) -> Any:
            lines.add(frame.f_lineno)
            return line

        return line
