"""The command line, called in this process."""

import json
from typing import Any

import pytest
from click.testing import CliRunner, Result

from hsfmt.cli.failures import INTERNAL
from hsfmt.cli.main import main


class Hsfmt:
    """Calls `hsfmt`; a traceback is a failure, whatever the exit code."""

    def __call__(self, *args: object, code: int | None = 0) -> Result:
        result = CliRunner().invoke(main, [str(arg) for arg in args], prog_name="hsfmt")
        assert code in (None, result.exit_code), f"exit {result.exit_code}\n{result.stdout}\n{result.stderr}"
        assert result.exit_code < INTERNAL, result.stderr
        assert "Traceback" not in result.output
        return result

    def json(self, *args: object, code: int = 0) -> Any:
        return json.loads(self(*args, "--json", code=code).stdout)


@pytest.fixture(scope="session")
def hsfmt() -> Hsfmt:
    return Hsfmt()
